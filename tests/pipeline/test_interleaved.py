"""Virtual stages: the paper's lists and bubble on straight grids, sound lists on damaged ones, and the choice."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parallel3d.errors import ScheduleError
from parallel3d.pipeline.check import MessageSizes, check_plan
from parallel3d.pipeline.chunk_layout import ChunkLayout
from parallel3d.pipeline.instructions import Op, instructions_for
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import choose_plan, complete_candidates, costs_by_op, plan_pipeline
from parallel3d.pipeline.request import PlanRequest
from tests.support.damaged_grids import damaged_grids, plan_requests, schedule_fields
from tests.support.tiers import examples

COMPUTES = {Op.FORWARD: "F", Op.BACKWARD: "B"}
straight_grids = st.tuples(st.integers(2, 6), st.integers(2, 4), st.integers(1, 3), st.integers(1, 4))
"""(stages, chunks, replicas, groups of as many micro-batches as there are stages)"""
GRIDS = damaged_grids(min_stages=2, max_stages=5, max_replicas=4)
slots_of_a_pair = st.sampled_from([1, 2, 3, 100])


def make_request(replicas, num_micro_batches, virtual_stages, *, schedule="interleaved", costs=(1, 1, 1), **options):
    num_stages = len(replicas) * virtual_stages
    forward, of_input, of_weight = ((cost,) * num_stages for cost in costs)
    return PlanRequest(
        replicas=replicas,
        num_micro_batches=num_micro_batches,
        **schedule_fields(schedule, virtual_stages),
        virtual_stages=virtual_stages,
        costs=StageCosts(forward=forward, backward_input=of_input, backward_weight=of_weight),
        **options,
    )


def lose(num_stages, width, *lost):
    return tuple(tuple(d for d in range(width) if (p, d) not in lost) for p in range(num_stages))


def textbook(num_stages, num_chunks, stage, num_micro_batches):
    """Narayanan et al., section 2.2 and figure 4: (F or B, micro-batch, chunk), one after the other, of one stage.

    Groups of as many micro-batches as there are stages go through the chunks, backwards through the chunks in reverse.
    The first group reaches the last stage's last chunk after (chunks - 1) groups; a stage further ahead warms up by two
    more for each stage behind it, since it waits for a forward and a backward of each. Then one forward, one backward.
    """

    def nth(number, direction):
        group, offset = divmod(number, num_stages * num_chunks)
        chunk, member = divmod(offset, num_stages)
        return direction, group * num_stages + member, chunk if direction == "F" else num_chunks - 1 - chunk

    total = num_micro_batches * num_chunks
    warmup = min(total, (num_chunks - 1) * num_stages + 2 * (num_stages - 1 - stage))
    steps = [nth(number, "F") for number in range(warmup)]
    for number in range(total - warmup):
        steps += [nth(warmup + number, "F"), nth(number, "B")]
    return steps + [nth(number, "B") for number in range(total - warmup, total)]


def computes_of(steps):
    return [(COMPUTES[step.op], step.micro_batch, step.chunk) for step in steps if step.op in COMPUTES]


# --- straight grids ---------------------------------------------------------------------------------------------------


@given(straight_grids, slots_of_a_pair, st.tuples(*[st.integers(1, 4)] * 3))
def test_straight_grids_have_the_papers_lists(grid, slots, costs):
    """Whatever the costs and the slots: each replica's computes are the paper's, one after the other."""
    num_stages, num_chunks, width, groups = grid
    replicas = (tuple(range(width)),) * num_stages
    plan = plan_pipeline(make_request(replicas, groups * num_stages * width, num_chunks, costs=costs, slots=slots))
    report = check_plan(plan, slots)
    for (stage, replica), steps in plan.lists.items():
        expected = textbook(num_stages, num_chunks, stage, groups * num_stages)
        assert computes_of(steps) == [(kind, m * width + replica, chunk) for kind, m, chunk in expected]
        most = min((num_chunks - 1) * num_stages + 2 * (num_stages - 1 - stage) + 1, groups * num_stages * num_chunks)
        assert report.peak_in_flight[stage, replica] == most


@given(straight_grids, slots_of_a_pair, st.sampled_from([(1, 1, 1), (2, 1, 1), (3, 2, 1)]))
def test_straight_grids_have_the_papers_bubble(grid, slots, costs):
    """(P - 1)(F + B) / V for a whole stage's F and B; here a chunk costs what is in `costs`."""
    num_stages, num_chunks, width, groups = grid
    rounds = groups * num_stages
    replicas = (tuple(range(width)),) * num_stages
    plan = plan_pipeline(make_request(replicas, rounds * width, num_chunks, costs=costs, slots=slots))
    assert plan.makespan == check_plan(plan, slots).makespan == (rounds * num_chunks + num_stages - 1) * sum(costs)
    share = Fraction(num_stages - 1, num_chunks * rounds + num_stages - 1)
    assert Fraction(plan.bubble).limit_denominator(1000) == share


def test_chunks_make_the_bubble_smaller():
    """pp4, 8 micro-batches, a stage of 12 units a pass: 1f1b and then 2, 3 and 4 chunks."""
    spans = [plan_pipeline(make_request(((0,),) * 4, 8, 1, schedule="1f1b", costs=(12, 12, 12))).makespan]
    for chunks in (2, 3, 4):
        spans.append(plan_pipeline(make_request(((0,),) * 4, 8, chunks, costs=(12 // chunks,) * 3)).makespan)
    compute_time = 8 * 36
    assert [span - compute_time for span in spans] == [108, 54, 36, 27]


@settings(max_examples=examples(40))
@given(straight_grids, st.integers(1, 11), slots_of_a_pair)
def test_micro_batches_that_do_not_come_in_whole_groups(grid, more, slots):
    """The last group is shorter: no list of the paper's, and at most the time that it would take if it were whole."""
    num_stages, num_chunks, width, groups = grid
    replicas = (tuple(range(width)),) * num_stages
    assume(more % num_stages)
    rounds = groups * num_stages + more % num_stages
    plan = plan_pipeline(make_request(replicas, rounds * width, num_chunks, slots=slots))
    check_plan(plan, slots)
    whole = plan_pipeline(make_request(replicas, (groups + 1) * num_stages * width, num_chunks, slots=slots))
    if slots > 1 or num_stages > 2:  # else an activation may wait for its targets to be read
        assert plan.makespan <= whole.makespan


@settings(max_examples=examples(25))
@given(straight_grids, slots_of_a_pair)
def test_evaluation_passes_all_chunks_and_holds_few(grid, slots):
    num_stages, num_chunks, width, groups = grid
    rounds = groups * num_stages
    replicas = (tuple(range(width)),) * num_stages
    request = make_request(replicas, rounds * width, num_chunks, schedule="forward", slots=slots)
    plan = plan_pipeline(request)
    check_plan(plan, slots)
    assert plan.makespan == rounds * num_chunks + num_stages - 1
    nothing = (0,) * num_stages * num_chunks
    sizes = MessageSizes(activation_bytes=1, targets_bytes=0, stash_bytes=nothing, deferred_bytes=nothing)
    longer = make_request(replicas, (rounds + 4 * num_stages) * width, num_chunks, schedule="forward", slots=slots)
    held, later = (max(check_plan(p, slots, sizes).peak_bytes.values()) for p in (plan, plan_pipeline(longer)))
    assert later <= max(held, 2 * num_stages * num_chunks)  # however many micro-batches there are


# --- damaged grids ----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(
    plan_requests(
        grids=GRIDS,
        schedules=["interleaved", "forward"],
        chunks=st.integers(2, 4),
        max_micro_batches=30,
        max_slots=3,
    )
)
def test_damaged_grids_have_sound_plans(requested):
    request, replicas, slots = requested, requested.replicas, requested.slots
    plan = plan_pipeline(request)
    report = check_plan(plan, slots)
    if slots > 1 or len(replicas) > 2:
        assert report.makespan <= plan.makespan
    compute_time, ends = Counter(), Counter()
    for event in plan.events:
        virtual_stage = event.chunk * len(replicas) + event.replica[0]
        assert event.end - event.start == costs_by_op(request)[event.op][virtual_stage]
        assert event.start >= ends[event.replica]
        ends[event.replica] = event.end
        compute_time[event.replica] += event.end - event.start
    assert plan.busy == {replica: compute_time[replica] for replica in plan.lists}
    assert plan.makespan == max(ends.values())


@pytest.mark.each_value
@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize(
    ("num_stages", "width", "num_micro_batches", "lost", "most"),
    [
        (4, 4, 32, [(1, 2)], 1.02),
        (4, 4, 32, [(0, 2)], 1.02),
        (4, 4, 32, [(3, 2)], 1.05),
        (4, 4, 32, [(1, 2), (1, 3)], 1.02),
        (4, 4, 32, [(1, 2), (2, 0)], 1.07),
        (4, 4, 32, [(1, 2), (2, 0), (3, 1)], 1.08),
        (2, 4, 32, [(1, 1)], 1.02),
        (3, 2, 12, [(1, 0)], 1.03),
        (4, 2, 16, [(1, 0), (2, 1)], 1.03),
        (8, 4, 64, [(1, 2), (5, 1)], 1.06),
    ],
)
def test_the_choice_keeps_the_busiest_replica_busy(num_stages, width, num_micro_batches, lost, most, num_chunks):
    """A whole stage takes 12 units a pass, 36 a micro-batch; 1f1b takes up to 1.12 of the busiest one's work."""
    grid, costs = lose(num_stages, width, *lost), (12 // num_chunks,) * 3
    plan = choose_plan(
        make_request(grid, num_micro_batches, num_chunks, costs=costs), may_split=True, max_extra_in_flight=2
    )
    check_plan(plan, slots=3)
    compute_time = -(-num_micro_batches // min(map(len, grid))) * 36
    assert compute_time <= plan.makespan <= most * compute_time, plan.reason


@settings(max_examples=examples(40))
@given(GRIDS, st.integers(2, 3), st.integers(1, 20), st.integers(1, 3))
def test_the_choice_is_the_best_of_its_table(replicas, num_chunks, num_micro_batches, slots):
    request = make_request(replicas, num_micro_batches, num_chunks, slots=slots)
    assume(not request.is_straight)
    plan = choose_plan(request, may_split=True, max_extra_in_flight=2)
    check_plan(plan, slots)
    table = complete_candidates(plan).candidates
    assert plan.makespan == min(candidate.makespan for candidate in table)
    for quick, whole in zip(plan.candidates, table):
        assert quick == whole or plan.makespan <= quick.makespan <= whole.makespan


def test_what_no_loss_touches_keeps_the_papers_list():
    """The three orphans of the middle stage go to replicas 0, 2 and 3: replica 4 does not notice."""
    everybody = (0, 1, 2, 3, 4)
    plan = plan_pipeline(make_request((everybody, (0, 2, 3, 4), everybody), 15, 2, costs=(2, 1, 3)))
    assert {route[1] for route in plan.routes if len(set(route)) > 1} == {0, 2, 3}
    for stage in range(3):
        expected = [(kind, m * 5 + 4, chunk) for kind, m, chunk in textbook(3, 2, stage, 3)]
        assert computes_of(plan.lists[stage, 4]) == expected


# --- instructions, and what the checker finds -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "chunk", "expected"),
    [
        (0, 0, "load 7, forward 7, send activation 7 -> (1, 6), receive gradient 7 <- (1, 6), backward 7"),
        (
            1,
            0,
            "receive activation 7 <- (0, 5), forward 7, send activation 7 -> (0, 5), "
            "receive gradient 7 <- (0, 5), backward 7, send gradient 7 -> (0, 5)",
        ),
        (
            0,
            1,
            "receive activation 7 chunk 1 <- (1, 6), send targets 7 chunk 1 -> (1, 6), forward 7 chunk 1, "
            "send activation 7 chunk 1 -> (1, 6), receive gradient 7 chunk 1 <- (1, 6), backward 7 chunk 1, "
            "send gradient 7 chunk 1 -> (1, 6)",
        ),
        (
            1,
            1,
            "receive targets 7 chunk 1 <- (0, 5), receive activation 7 chunk 1 <- (0, 5), forward 7 chunk 1, "
            "backward 7 chunk 1, send gradient 7 chunk 1 -> (0, 5)",
        ),
    ],
)
def test_steps_of_a_chunk(stage, chunk, expected):
    assert (
        ", ".join(map(str, instructions_for((5, 6), 7, stage, chunk, layout=ChunkLayout.round_robin(2, 2)))) == expected
    )


def test_both_ends_agree_on_who_reads_a_message():
    """The virtual stage that stands in the header: 2 stages of 2 chunks are virtual stages 0 to 3."""
    reader_stage = {
        (step.op, stage, chunk): step.reader_stage(stage, ChunkLayout.round_robin(2, 2))
        for stage in range(2)
        for chunk in range(2)
        for step in instructions_for((0, 0), 0, stage, chunk, layout=ChunkLayout.round_robin(2, 2))
        if step.peer is not None
    }
    activations = {
        (stage, chunk): reader_stage[Op.SEND_ACTIVATION, stage, chunk] for stage, chunk in [(0, 0), (1, 0), (0, 1)]
    }
    gradients = {
        (stage, chunk): reader_stage[Op.SEND_GRADIENT, stage, chunk] for stage, chunk in [(1, 0), (0, 1), (1, 1)]
    }
    assert activations == {(0, 0): 1, (1, 0): 2, (0, 1): 3}
    assert gradients == {(1, 0): 0, (0, 1): 1, (1, 1): 2}
    assert reader_stage[Op.RECV_ACTIVATION, 0, 1] == 2 and reader_stage[Op.RECV_GRADIENT, 1, 0] == 1
    assert reader_stage[Op.SEND_TARGETS, 0, 1] == reader_stage[Op.RECV_TARGETS, 1, 1] == 3


def test_a_message_for_the_other_chunk_is_caught():
    """The first stage sends the activation of chunk 1 before that of chunk 0: the same words, another order."""
    plan = plan_pipeline(make_request(((0,),) * 3, 3, 2, slots=100))
    steps = list(plan.lists[1, 0])
    reads = [i for i, step in enumerate(steps) if step.op is Op.RECV_ACTIVATION and step.micro_batch == 0]
    steps.insert(reads[0], steps.pop(reads[1]))
    wrong = replace(plan, lists={**plan.lists, (1, 0): tuple(steps)})
    with pytest.raises(ScheduleError, match=r"has 'send activation 0' where \(1, 0\) has .* 0 for chunk 1'"):
        check_plan(wrong, slots=100)
