"""Instruction lists: the textbook's on straight grids, correct and free of deadlock on damaged ones."""

from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.errors import ScheduleError
from parallel3d.pipeline.check import check_plan
from parallel3d.pipeline.instructions import Op, instructions_for
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import costs_by_op, plan_pipeline
from parallel3d.pipeline.request import PlanRequest
from tests.support.damaged_grids import damaged_grids, plan_requests, schedule_fields
from tests.support.plan_requests import lose, make_request, straight_grids
from tests.support.tiers import examples


def textbook(schedule, num_stages, stage, mine):
    """The computes of one stage for its micro-batches, written down as the papers do."""
    forwards, backwards = [("F", m) for m in mine], [("B", m) for m in mine]
    if schedule == "forward":
        return forwards
    if schedule == "gpipe":
        return forwards + backwards
    warmup = min(num_stages - 1 - stage, len(mine))
    if schedule == "zb-h1":
        return zb_h1(warmup, stage, mine)
    steady = [step for pair in zip(forwards[warmup:], backwards) for step in pair]
    return forwards[:warmup] + steady + backwards[len(mine) - warmup :]


def zb_h1(warmup, stage, mine):
    """Qi et al., figure 3: 1F1B, whose products for the weights begin after as many backwards as the stage's number.

    So every stage holds as many micro-batches as the first.
    """
    steps, weights = [("F", m) for m in mine[:warmup]], [("W", m) for m in mine]
    for number, micro_batch in enumerate(mine):
        steps += [("F", mine[warmup + number])] if warmup + number < len(mine) else []
        steps += [("B", micro_batch)] + ([weights.pop(0)] if number >= stage else [])
    return steps + weights


def with_messages(computes, route, stage, schedule):
    """Receives right before the compute that needs them, sends right after the one that made the value."""
    steps = []
    for kind, micro_batch in computes:
        every = instructions_for(route, micro_batch, stage, backward=schedule != "forward", split=schedule == "zb-h1")
        if kind == "W":
            steps += every[-1:]
            continue
        every = [step for step in every if step.op is not Op.BACKWARD_WEIGHT]
        ops = (Op.RECV_GRADIENT, Op.BACKWARD, Op.BACKWARD_INPUT)
        cut = next((i for i, step in enumerate(every) if step.op in ops), len(every))
        steps += every[:cut] if kind == "F" else every[cut:]
    return steps


def most_unread(plan):
    """For each ordered pair, the most messages in its slots at one moment of the simulated run; not the targets."""
    senders = {(event.op, event.replica[0], event.micro_batch): event for event in plan.events}
    changes = defaultdict(list)
    for (op, stage, micro_batch), event in senders.items():
        if op is Op.BACKWARD_WEIGHT:
            continue
        reader = senders.get((op, stage + (1 if op is Op.FORWARD else -1), micro_batch))
        if reader:
            changes[event.replica, reader.replica] += [(event.end, 1), (reader.start, -1)]
    return {pair: max(accumulate(change for _, change in sorted(times))) for pair, times in changes.items()}


# --- straight grids ---------------------------------------------------------------------------------------------------


@given(straight_grids, st.sampled_from(["1f1b", "gpipe", "forward"]), st.sampled_from([1, 2, 3, 100]))
def test_straight_grids_have_the_textbooks_lists(grid, schedule, slots):
    num_stages, width, num_micro_batches, (forward, backward) = grid
    replicas = (tuple(range(width)),) * num_stages
    request = make_request(
        replicas, num_micro_batches, schedule=schedule, forward=forward, backward=backward, slots=slots
    )
    assert_textbook(plan_pipeline(request))


@given(straight_grids, st.sampled_from([1, 2, 3, 100]))
def test_straight_grids_have_the_lists_of_zb_h1(grid, slots):
    num_stages, width, rounds, _ = grid
    num_micro_batches = width * max(rounds, num_stages)  # with fewer the paper's lists wait where ours fill in
    plan = plan_pipeline(
        make_request((tuple(range(width)),) * num_stages, num_micro_batches, schedule="zb-h1", slots=slots)
    )
    assert_textbook(plan)
    held = check_plan(plan, slots).peak_in_flight
    assert set(held.values()) == {num_stages}  # 1F1B's first stage holds as many


def assert_textbook(plan):
    request, num_stages = plan.request, len(plan.request.replicas)
    for (stage, replica), steps in plan.lists.items():
        mine = range(replica, request.num_micro_batches, len(request.replicas[stage]))
        computes = textbook(request.name, num_stages, stage, mine)
        expected = with_messages(computes, (replica,) * num_stages, stage, request.name)
        if request.slots < num_stages:  # then targets are read early, to free a slot of their pair
            steps = [step for step in steps if step.op is not Op.RECV_TARGETS]
            expected = [step for step in expected if step.op is not Op.RECV_TARGETS]
        assert list(steps) == expected


@given(straight_grids)
def test_straight_grids_have_the_textbooks_bubble(grid):
    num_stages, width, rounds, (forward, backward) = grid
    replicas = (tuple(range(width)),) * num_stages
    for schedule in ("1f1b", "gpipe"):
        request = make_request(replicas, rounds * width, schedule=schedule, forward=forward, backward=backward)
        plan = plan_pipeline(request)
        assert plan.makespan == (rounds + num_stages - 1) * (forward + sum(backward))
        assert Fraction(plan.bubble).limit_denominator(1000) == Fraction(num_stages - 1, rounds + num_stages - 1)


@pytest.mark.parametrize(("forward", "of_input", "of_weight"), [(1, 1, 1), (10, 10, 10), (10, 11, 10), (4, 5, 4)])
@given(st.integers(1, 8), st.integers(0, 30))
def test_zb_h1_has_the_papers_bubble(forward, of_input, of_weight, num_stages, more):
    """(p - 1)(T_F + T_B - T_W) where 1F1B's is (p - 1)(T_F + T_B + T_W): Qi et al., section 2.3, table 2.

    With T_W = T_F <= T_B; elsewhere a half for the weights that fills a gap may end after the gap.
    """
    num_micro_batches = 2 * num_stages + more
    backward = (of_input, of_weight)
    request = make_request(
        ((0,),) * num_stages, num_micro_batches, schedule="zb-h1", forward=forward, backward=backward
    )
    compute_time = num_micro_batches * (forward + of_input + of_weight)
    plan = plan_pipeline(request)
    assert plan.makespan - compute_time == (num_stages - 1) * (forward + of_input - of_weight)
    assert plan.bubble == 1 - compute_time / plan.makespan


def test_bubble_of_8_stages_and_32_micro_batches():
    assert plan_pipeline(make_request(((0,),) * 8, 32)).bubble == pytest.approx(0.179, abs=5e-4)


def test_targets_do_not_hold_up_a_deep_pipeline():
    """The first stage runs 16 micro-batches ahead; with one slot it still never waits for the last one to read."""
    plan = plan_pipeline(make_request(((0,),) * 16, 64, slots=1))
    assert plan.makespan == (64 + 15) * 3
    assert check_plan(plan, slots=1).makespan == plan.makespan


# --- damaged grids ----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(300))
@given(plan_requests(grids=damaged_grids(), schedules=["1f1b", "gpipe", "zb-h1", "forward"]))
def test_damaged_grids_have_sound_plans(requested):
    request, replicas, slots = requested, requested.replicas, requested.slots
    plan = plan_pipeline(request)
    report = check_plan(plan, slots)
    if slots > 1 or len(replicas) != 2:  # two stages and one slot: an activation may wait for its targets to be read
        assert report.makespan <= plan.makespan
    for (stage, _), held in report.peak_in_flight.items():
        if request.limits_in_flight:
            assert held <= len(replicas) + request.extra_in_flight - (0 if request.splits else stage)
    assert list(plan.events) == sorted(plan.events, key=lambda event: (event.start, event.replica))
    most_allowed = max(slots, 2) if len(replicas) == 2 else slots
    assert all(most <= most_allowed for most in most_unread(plan).values())
    compute_time, ends = Counter(), Counter()
    for event in plan.events:
        assert event.end - event.start == costs_by_op(request)[event.op][event.replica[0]]
        assert event.start >= ends[event.replica]
        ends[event.replica] = event.end
        compute_time[event.replica] += event.end - event.start
    assert plan.busy == {replica: compute_time[replica] for replica in plan.lists}
    assert plan.makespan == max(ends.values())


@settings(max_examples=examples(300))
@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "gpipe", "zb-h1", "forward", "interleaved"]))
def test_two_stages_with_one_slot_never_get_stuck(seed, schedule):
    """Targets and activation of a micro-batch share it, so that a send may wait; about 1 % of these are delicate."""
    numbers = Random(seed)
    chunks = 2 if schedule == "interleaved" else 1
    costs = [tuple(numbers.randint(1, 4) for _ in range(2 * chunks)) for _ in range(3)]
    request = PlanRequest(
        replicas=tuple(tuple(numbers.sample(range(6), numbers.randint(1, 4))) for _ in range(2)),
        num_micro_batches=numbers.randint(4, 30),
        **schedule_fields(schedule, chunks),
        virtual_stages=chunks,
        costs=StageCosts(forward=costs[0], backward_input=costs[1], backward_weight=costs[2]),
        slots=1,
        split_backward=schedule != "forward" and numbers.random() < 0.5,
        extra_in_flight=numbers.randint(0, 3),
    )
    check_plan(plan_pipeline(request), slots=1)


def test_more_in_flight_fills_the_bubbles_that_rerouting_makes():
    damaged = lose(4, 4, (1, 2))
    spans = [plan_pipeline(make_request(damaged, 32, extra_in_flight=extra)).makespan for extra in range(3)]
    assert spans == [43, 40, 40]
    spans = [
        plan_pipeline(make_request(damaged, 32, split_backward=True, extra_in_flight=extra)).makespan
        for extra in range(3)
    ]
    assert spans == [37, 35, 34]
    assert plan_pipeline(make_request(damaged, 32)).bubble == pytest.approx(1 - 33 / 43)  # of the 11 that stage 1 has


def test_a_replica_without_work_has_an_empty_list():
    plan = plan_pipeline(make_request(((0, 1), (0,)), 1))
    assert plan.lists[0, 1] == ()
    assert plan.busy[0, 1] == 0
    check_plan(plan, slots=3)


# --- components, digest, requests -------------------------------------------------------------------------------------


def test_what_no_loss_touches_keeps_its_lists():
    """Micro-batch 1 moves to replica 0 at the middle stage: replica 2 does not notice."""
    damaged = plan_pipeline(make_request(((0, 1, 2), (0, 2), (0, 1, 2)), 12))
    whole = plan_pipeline(make_request(((0, 1, 2),) * 3, 12))
    three_losses = plan_pipeline(make_request(((0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3)), 4))
    assert damaged.lists[1, 2] != whole.lists[1, 2]  # 4 orphans reach both of the others
    assert {step.micro_batch for step in three_losses.lists[1, 0]} == {0, 1}
    for replica in (2, 3):
        alone = plan_pipeline(make_request(((0, 1, 2, 3),) * 3, 4))
        assert [three_losses.lists[s, replica] for s in range(3)] == [alone.lists[s, replica] for s in range(3)]


def test_a_large_grid():
    plan = plan_pipeline(make_request((tuple(range(32)),) * 16, 32 * 32))
    assert plan.makespan == (32 + 15) * 3
    assert len(plan.lists) == 16 * 32


@given(damaged_grids(), st.integers(1, 20), st.randoms(use_true_random=False))
def test_the_digest_depends_on_the_lists_alone(replicas, num_micro_batches, random):
    plan = plan_pipeline(make_request(replicas, num_micro_batches))
    shuffled = tuple(tuple(random.sample(ids, len(ids))) for ids in replicas)
    again = plan_pipeline(make_request(shuffled, num_micro_batches))
    assert dict(again.lists) == dict(plan.lists)
    assert again.digest == plan.digest
    assert plan_pipeline(make_request(replicas, num_micro_batches + 1)).digest != plan.digest


@pytest.mark.parametrize(
    ("schedule", "digest"),
    [("1f1b", "f84d8e0c2ea19824fa230ae833353caa"), ("gpipe", "463533ce880ae8e34bc1511a1b9359dd")],
)
def test_the_digest_is_the_same_on_every_machine(schedule, digest):
    replicas = ((0, 1, 2, 3), (3, 0), (1, 2), (0, 1, 2, 3))
    assert plan_pipeline(make_request(replicas, 16, schedule=schedule)).digest == digest


GOLDEN = [
    ("1f1b", 1, {}, 43, "1a073562f318f436364e3407b49d60d5"),
    ("1f1b", 1, {"split_backward": True, "extra_in_flight": 2}, 34, "dce233c2067e0e04b9c3ed89150c5c82"),
    ("gpipe", 1, {"routing": "drop"}, 42, "e9ab99b20df37bb709b03b2e0624c848"),
    ("zb-h1", 1, {"slots": 1}, 36, "380165915a1b12d7f73e9994bf24ba4e"),
    ("interleaved", 2, {}, 71, "8a125b4b45162974007b7ebcc92c1d7a"),
    ("zb-v", 2, {}, 68, "f1aaaba3a5272076c56c328abb6e5c42"),
]


@pytest.mark.parametrize(("schedule", "chunks", "options", "makespan", "digest"), GOLDEN)
def test_plans_stay_as_they_are(schedule, chunks, options, makespan, digest):
    """pp4 x dp4 with one replica lost: ranks of other versions, and other machines, make the same lists."""
    plan = plan_pipeline(
        PlanRequest(
            replicas=lose(4, 4, (1, 2)),
            num_micro_batches=32,
            schedule=schedule,
            virtual_stages=chunks,
            costs=StageCosts.equal(4 * chunks),
            **options,
        )
    )
    assert (plan.makespan, plan.digest) == (makespan, digest)


def test_two_stages_share_a_pair_for_targets_and_activations():
    """With two slots the second micro-batch is loaded when the last stage has read the first."""
    request = make_request(((0,), (0,)), 4, schedule="forward", forward=3, slots=2)
    starts = [event.start for event in plan_pipeline(request).events if event.replica == (0, 0)]
    assert starts == [0, 3, 6, 9]
    slow_reader = replace(request, costs=replace(request.costs, forward=(1, 5)))
    starts = [event.start for event in plan_pipeline(slow_reader).events if event.replica == (0, 0)]
    assert starts == [0, 1, 6, 11]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"replicas": ((0,), ())}, "a stage has no replica"),
        ({"replicas": ((0,), (1, 1))}, "occurs twice"),
        ({"num_micro_batches": 0}, "0 micro-batches"),
        ({"schedule": "zigzag"}, "unknown schedule 'zigzag'"),
        ({"costs": StageCosts.equal(1)}, "costs of 1 stages, 2 stages"),
        ({"virtual_stages": 2}, "2 virtual stages: .* 1f1b needs 1; costs of 2 stages, 4 stages"),
        ({"schedule": "interleaved"}, "1 virtual stages: .* interleaved needs at least 2"),
        ({"schedule": "interleaved", "virtual_stages": 2, "replicas": ((0,),)}, "chunks alternate between stages"),
        ({"virtual_stages": 0}, "0 virtual stages"),
        ({"routing": "drop", "replicas": ((0,), (1,))}, "no id is alive at every stage"),
        ({"has_backward": False, "split_backward": True}, "no backward pass to split"),
        ({"slots": 0}, "0 slots"),
        ({"extra_in_flight": -1}, "extra_in_flight -1"),
    ],
)
def test_requests_that_make_no_sense(wrong, message):
    right = {
        "replicas": ((0,), (0,)),
        "num_micro_batches": 2,
        "schedule": "1f1b",
        "costs": StageCosts.equal(2),
    }
    with pytest.raises(ScheduleError, match=message):
        PlanRequest(**right | wrong)
