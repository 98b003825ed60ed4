"""The checker: plans that are wrong in one place are caught, and the numbers of those that are right."""

import random
from dataclasses import replace

import pytest

from parallel3d.errors import ScheduleError
from parallel3d.pipeline.check import MessageSizes, check_plan
from parallel3d.pipeline.instructions import Instruction, Op
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import plan_pipeline
from parallel3d.pipeline.request import PlanRequest
from tests.support.damaged_grids import schedule_fields


def make_plan(replicas=((0,),) * 3, num_micro_batches=6, **options):
    costs = StageCosts.equal(len(replicas))
    fields = schedule_fields(options.pop("schedule", "1f1b")) | {
        "costs": replace(costs, forward=options.pop("forward_costs", costs.forward))
    }
    return plan_pipeline(PlanRequest(replicas=replicas, num_micro_batches=num_micro_batches, **fields | options))


def changed(plan, replica, change):
    """The plan with one list changed in place by `change`."""
    steps = list(plan.lists[replica])
    change(steps)
    return replace(plan, lists={**plan.lists, replica: tuple(steps)})


def find(steps, op, micro_batch):
    return next(i for i, step in enumerate(steps) if (step.op, step.micro_batch) == (op, micro_batch))


def swap(op_a, a, op_b, b):
    def change(steps):
        i, j = find(steps, op_a, a), find(steps, op_b, b)
        steps[i], steps[j] = steps[j], steps[i]

    return change


def drop(op, micro_batch):
    return lambda steps: steps.pop(find(steps, op, micro_batch))


# --- what is wrong is caught ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replica", "change", "message"),
    [
        ((1, 0), drop(Op.RECV_ACTIVATION, 2), r"\(1, 0\), micro-batch 2: 'forward 2' stands where 'receive activation"),
        (
            (1, 0),
            drop(Op.BACKWARD, 5),
            r"\(1, 0\), micro-batch 5: 'send gradient 5 -> \(0, 0\)' stands where 'backward",
        ),
        ((2, 0), drop(Op.SEND_GRADIENT, 1), r"\(2, 0\), micro-batch 1: 'nothing' stands where 'send gradient 1"),
        ((0, 0), lambda steps: steps.append(Instruction(Op.BACKWARD, 3)), r"micro-batch 3: 'backward 3' .* 'nothing'"),
        ((0, 0), lambda steps: steps.append(Instruction(Op.FORWARD, 9)), r"micro-batch 9: 'forward 9' .* 'nothing'"),
        ((1, 0), swap(Op.RECV_ACTIVATION, 3, Op.FORWARD, 3), r"micro-batch 3: 'forward 3' stands where 'receive"),
        ((2, 0), swap(Op.FORWARD, 3, Op.BACKWARD, 3), r"micro-batch 3: 'backward 3' stands where 'forward 3'"),
        (
            (1, 0),
            swap(Op.SEND_ACTIVATION, 0, Op.SEND_ACTIVATION, 1),
            r"micro-batch 1: 'send activation 1 .* where 'receive activation 1",
        ),
    ],
)
def test_a_wrong_step_is_named(replica, change, message):
    plan = make_plan()
    check_plan(plan, slots=3)
    with pytest.raises(ScheduleError, match=message):
        check_plan(changed(plan, replica, change), slots=3)


def test_a_send_to_the_wrong_replica_is_named():
    def misdirect(steps):
        i = find(steps, Op.SEND_ACTIVATION, 2)
        steps[i] = steps[i]._replace(peer=(1, 1))

    with pytest.raises(
        ScheduleError, match=r"'send activation 2 -> \(1, 1\)' stands where 'send activation 2 -> \(1, 0"
    ):
        check_plan(changed(make_plan(((0, 1),) * 3), (0, 0), misdirect), slots=3)


def test_a_missing_list_is_named():
    plan = make_plan()
    plan = replace(plan, lists={replica: steps for replica, steps in plan.lists.items() if replica != (1, 0)})
    with pytest.raises(ScheduleError, match=r"differ in \[\(1, 0\)\]"):
        check_plan(plan, slots=3)


def test_messages_that_overtake_each_other_are_caught():
    """Each step is right for its micro-batch, but gpipe's first stage runs forward 1 before forward 0."""
    plan = make_plan(schedule="gpipe")

    def reverse(steps):
        length = next(i for i, step in enumerate(steps) if step.micro_batch == 1)
        steps[: 2 * length] = steps[length : 2 * length] + steps[:length]

    wrong = changed(plan, (0, 0), reverse)
    with pytest.raises(
        ScheduleError, match=r"message 0 from \(0, 0\) to \(1, 0\): .* activation 1' where .* activation 0'"
    ):
        check_plan(wrong, slots=3)


def test_the_two_receives_of_the_last_stage_may_change_places_unless_they_share_a_pair():
    exchange = swap(Op.RECV_TARGETS, 1, Op.RECV_ACTIVATION, 1)
    check_plan(changed(make_plan(((0,),) * 3), (2, 0), exchange), slots=3)
    with pytest.raises(ScheduleError, match=r"message 2 from \(0, 0\) to \(1, 0\): .* 'send targets 1' where"):
        check_plan(changed(make_plan(((0,),) * 2), (1, 0), exchange), slots=3)


def test_lists_that_wait_for_each_other_are_named():
    """Both stages take the second micro-batch's backward first: right steps, matching pairs, no end."""
    plan = make_plan(((0,),) * 2, 2, schedule="gpipe")
    first, last = plan.lists[0, 0], list(plan.lists[1, 0])
    late = last.pop(find(last, Op.RECV_ACTIVATION, 1)), last.pop(find(last, Op.FORWARD, 1))
    targets = last.pop(find(last, Op.RECV_TARGETS, 1))
    gradient = find(first, Op.RECV_GRADIENT, 0)
    forward = [step for step in first[:gradient] if step.micro_batch == 1]
    backward = [step for step in first[gradient:] if step.micro_batch == 0]
    wrong_first = [*first[:4], *backward, *forward, *[s for s in first[gradient:] if s.micro_batch == 1]]
    wrong_last = [*last[:3], targets, *late, *last[3:]]
    wrong = replace(plan, lists={(0, 0): tuple(wrong_first), (1, 0): tuple(wrong_last)})
    with pytest.raises(ScheduleError) as raised:
        check_plan(wrong, slots=3)
    assert str(raised.value) == (
        "the lists never end with 3 slots a pair:\n"
        "  (0, 0) at instruction 4, 'receive gradient 0 <- (1, 0)': waits for (1, 0) to send\n"
        "  (1, 0) at instruction 3, 'receive targets 1 <- (0, 0)': waits for (0, 0) to send"
    )


def damaged_grids(number, seed):
    generator = random.Random(seed)
    for _ in range(number):
        num_stages, width = generator.randint(3, 6), generator.randint(2, 6)
        stages = [
            generator.sample(range(width), max(1, width - generator.choice([0, 0, 1, 2]))) for _ in range(num_stages)
        ]
        yield tuple(map(tuple, stages)), width * generator.randint(2, 8)


def count_deadlocks(planned_slots, slots):
    deadlocks = 0
    for replicas, num_micro_batches in damaged_grids(100, seed=0):
        plan = make_plan(replicas, num_micro_batches, slots=planned_slots, extra_in_flight=2)
        try:
            check_plan(plan, slots)
        except ScheduleError as error:
            assert "the lists never end with 1 slot a pair:\n" in str(error)
            deadlocks += 1
    return deadlocks


def test_slots_are_part_of_the_plan():
    """Lists made for three slots get stuck with one on many damaged grids; made for one slot they never do."""
    assert count_deadlocks(planned_slots=3, slots=1) > 10  # 20 of 100 when written
    assert count_deadlocks(planned_slots=3, slots=3) == 0
    assert count_deadlocks(planned_slots=1, slots=1) == 0


# --- what is right has numbers ----------------------------------------------------------------------------------------


def test_1f1b_holds_fewer_micro_batches_on_later_stages():
    sizes = MessageSizes(activation_bytes=0, targets_bytes=0, stash_bytes=(100, 10, 1, 1000), deferred_bytes=(0,) * 4)
    report = check_plan(make_plan(((0,),) * 4, 16), 3, sizes)
    assert report.peak_in_flight == {(0, 0): 4, (1, 0): 3, (2, 0): 2, (3, 0): 1}
    assert report.peak_bytes == {(0, 0): 400, (1, 0): 30, (2, 0): 2, (3, 0): 1000}
    assert report.makespan == (16 + 3) * 3
    assert set(check_plan(make_plan(((0,),) * 4, 16, schedule="gpipe"), 3).peak_in_flight.values()) == {16}


def test_what_a_split_backward_puts_off_is_charged_between_its_halves():
    """One stage: forward and both halves in turn. On the last of four some weights' halves wait, at a smaller price."""
    sizes = MessageSizes(activation_bytes=0, targets_bytes=0, stash_bytes=(10,) * 4, deferred_bytes=(1,) * 4)
    report = check_plan(make_plan(((0,),), 4, schedule="zb-h1"), 3, sizes)
    assert report.peak_bytes == {(0, 0): 10}
    report = check_plan(make_plan(((0,),) * 4, 16, schedule="zb-h1"), 3, sizes)
    assert set(report.peak_in_flight.values()) == {4}
    assert report.peak_bytes[3, 0] % 10 > 0 and max(report.peak_bytes.values()) <= 40


def test_messages_are_charged_to_both_ends_and_waiting_ones_to_their_sender():
    """A slow second stage: targets 1, activation 1 and targets 2 fill the slots, activation 2 waits for one."""
    sizes = MessageSizes(activation_bytes=100, targets_bytes=1, stash_bytes=(0, 0), deferred_bytes=(0, 0))
    report = check_plan(make_plan(((0,),) * 2, 8, schedule="forward", forward_costs=(1, 50)), 3, sizes)
    assert report.peak_bytes == {(0, 0): 202, (1, 0): 102}
    assert report.makespan == 1 + 8 * 50


def test_fewer_slots_hold_fewer_bytes():
    sizes = MessageSizes(activation_bytes=100, targets_bytes=0, stash_bytes=(0, 0, 0), deferred_bytes=(0, 0, 0))
    plan = make_plan(((0,),) * 3, 8, schedule="forward", slots=10, forward_costs=(1, 50, 1))
    many, one = check_plan(plan, 10, sizes), check_plan(plan, 1, sizes)
    assert (many.peak_bytes[1, 0], one.peak_bytes[1, 0]) == (700, 100)
    assert many.makespan == one.makespan == plan.makespan
    assert check_plan(plan, 3).peak_bytes == {}


def test_what_is_read_early_is_charged_until_it_is_used():
    sizes = MessageSizes(activation_bytes=100, targets_bytes=0, stash_bytes=(0, 0, 0), deferred_bytes=(0, 0, 0))
    plan = make_plan(((0,),) * 3, 8, schedule="forward", slots=10, forward_costs=(1, 50, 1))

    def read_all_first(steps):
        steps.sort(key=lambda step: step.op is not Op.RECV_ACTIVATION)

    eager = check_plan(changed(plan, (1, 0), read_all_first), 10, sizes)
    assert eager.peak_bytes[1, 0] == check_plan(plan, 10, sizes).peak_bytes[1, 0] == 700
    assert eager.makespan == 8 + 8 * 50 + 1
