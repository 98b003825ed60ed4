"""ZB-V: the authors' lists and makespan on straight grids, memory, sound lists on damaged ones."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.errors import ScheduleError
from parallel3d.pipeline.check import MessageSizes, _byte_changes, _Execution, check_plan
from parallel3d.pipeline.chunk_layout import ChunkLayout
from parallel3d.pipeline.instructions import Op, instructions_for
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import Plan, choose_plan, plan_pipeline
from parallel3d.pipeline.request import PlanRequest
from parallel3d.pipeline.schedules import SCHEDULES
from tests.support.damaged_grids import damaged_grids, plan_requests

LETTERS = {Op.FORWARD: "F", Op.BACKWARD_INPUT: "B", Op.BACKWARD_WEIGHT: "W"}
straight_grids = st.tuples(st.integers(2, 6), st.integers(1, 3), st.integers(0, 20))
"""(stages, replicas, micro-batches a replica above the number of stages)"""


def make_plan(replicas, num_micro_batches, **options) -> Plan:
    return plan_pipeline(make_request(replicas, num_micro_batches, **options))


def make_request(replicas, num_micro_batches, **options) -> PlanRequest:
    return PlanRequest(
        replicas=replicas,
        num_micro_batches=num_micro_batches,
        schedule="zb-v",
        virtual_stages=2,
        costs=StageCosts.equal(2 * len(replicas)),
        **options,
    )


def textbook(num_stages: int, stage: int, num_micro_batches: int) -> list[str]:
    """The authors' lists (github.com/sail-sg/zero-bubble-pipeline-parallelism, and torch's ScheduleZBVZeroBubble).

    Steps are F, B or W with the chunk, in the order of micro-batches for each of them.
    """
    steps, done = [], {"F0": 0, "F1": 0, "B0": 0, "B1": 0, "W0": 0, "W1": 0}

    def add(*names: str) -> None:
        for name in names:
            steps.append(f"{name} {done[name]}")
            done[name] += 1

    for _ in range(2 * (num_stages - stage) - 1):
        add("F0")
    for _ in range(stage):
        add("F1", "F0")
    for _ in range(num_stages - stage):
        add("F1", "B1", "W1")
    while done["F1"] < done["F0"] or done["F0"] < num_micro_batches:
        if done["F0"] < num_micro_batches:
            add("F0")
        add("B0", "W0", "F1", "B1", "W1")
    for _ in range(stage):
        add("B0", "B1")
    for _ in range(num_stages - stage):
        add("B0", "W0")
    while done["W1"] < done["B1"]:
        add("W1")
    while done["W0"] < done["B0"]:
        add("W0")
    return steps


def computes(plan: Plan, stage: int) -> list[str]:
    steps = plan.lists[stage, 0]
    return [f"{LETTERS[step.op]}{step.chunk} {step.micro_batch}" for step in steps if step.op in LETTERS]


@pytest.mark.parametrize("num_stages", [2, 3, 4, 6])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_the_lists_are_the_authors(num_stages, more):
    """Up to the cool-down, in which the authors' products for weights wait for no gap and ours fill what is there."""
    num_micro_batches = 2 * num_stages - 1 + more
    plan = make_plan(((0,),) * num_stages, num_micro_batches)
    for stage in range(num_stages):
        ours, theirs = computes(plan, stage), textbook(num_stages, stage, num_micro_batches)
        last_forward = ours.index(f"F1 {num_micro_batches - 1}")
        assert ours[: last_forward + 1] == theirs[: last_forward + 1]
        assert sorted(ours) == sorted(theirs)


@given(straight_grids, st.sampled_from([1, 2, 3, 100]))
def test_the_only_pause_is_the_last_stages_wait_for_its_first_micro_batch(grid, slots):
    """Equal costs: six chunk passes a micro-batch and P - 1; 1F1B's bubble is six times that, ZB-H1's twice."""
    num_stages, width, more = grid
    num_micro_batches = num_stages + more
    plan = make_plan((tuple(range(width)),) * num_stages, num_micro_batches * width, slots=slots)
    report = check_plan(plan, slots)
    assert plan.makespan == report.makespan == 6 * num_micro_batches + num_stages - 1
    assert plan.bubble == pytest.approx(SCHEDULES["zb-v"].bubble(num_stages, 2, num_micro_batches))
    assert max(report.peak_in_flight.values()) <= 2 * num_stages  # halves of stages: as much as 1F1B's first stage


@settings(max_examples=200)
@given(
    plan_requests(
        grids=damaged_grids(min_stages=2, max_stages=5, max_replicas=4), schedules=["zb-v"], chunks=st.just(2)
    ),
    st.booleans(),
)
def test_damaged_grids_have_sound_plans(drawn, trains):
    fields = {} if trains else {"has_backward": False, "split_backward": False}
    request = replace(drawn, **fields)
    plan = plan_pipeline(request)
    report = check_plan(plan, request.slots)
    assert report.makespan <= plan.makespan
    if trains:
        assert max(report.peak_in_flight.values()) <= 2 * request.num_stages + request.extra_in_flight


def test_a_lost_replica_costs_little():
    """pp4 x dp4, 32 micro-batches: 66 chunk passes are the work of the busiest replica."""
    damaged = tuple(tuple(d for d in range(4) if (p, d) != (1, 2)) for p in range(4))
    plan = choose_plan(make_request(damaged, 32), may_split=True, max_extra_in_flight=2)
    assert plan.makespan == 68 and max(plan.busy.values()) == 66
    check_plan(plan, 3)


def test_what_goes_on_at_the_same_stage_is_kept_and_targets_stay():
    layout = ChunkLayout.v_shape(3)
    assert (layout.stages, layout.chunks) == ((0, 1, 2, 2, 1, 0), (0, 0, 0, 1, 1, 1))
    assert layout.virtual_stages == ((0, 5), (1, 4), (2, 3)) and layout.embedding_stages == (0,)
    told = [
        ", ".join(map(str, instructions_for((5, 6, 8), 7, stage, chunk, layout=layout, split=True)))
        for stage, chunk in ((0, 0), (2, 0), (2, 1), (0, 1))
    ]
    assert told == [
        "load 7, forward 7, send activation 7 -> (1, 6), receive gradient 7 <- (1, 6), backward input 7, "
        "backward weight 7",
        "receive activation 7 <- (1, 6), forward 7, keep activation 7, backward input 7, send gradient 7 -> (1, 6), "
        "backward weight 7",
        "forward 7 chunk 1, send activation 7 chunk 1 -> (1, 6), receive gradient 7 chunk 1 <- (1, 6), "
        "backward input 7 chunk 1, keep gradient 7 chunk 1, backward weight 7 chunk 1",
        "receive activation 7 chunk 1 <- (1, 6), forward 7 chunk 1, backward input 7 chunk 1, "
        "send gradient 7 chunk 1 -> (1, 6), backward weight 7 chunk 1",
    ]


def test_a_chunk_that_runs_before_the_one_it_continues_is_found():
    plan = make_plan(((0,), (0,)), 2)
    steps = list(plan.lists[1, 0])
    first = next(i for i, step in enumerate(steps) if step.op is Op.FORWARD)
    second = next(i for i, step in enumerate(steps) if step.op is Op.FORWARD and step.chunk == 1)
    steps.insert(first, steps.pop(second))
    wrong = replace(plan, lists={**plan.lists, (1, 0): tuple(steps)})
    with pytest.raises(ScheduleError, match=r"'forward 0 chunk 1' comes before the chunk that it continues"):
        check_plan(wrong, 3)


def test_what_is_kept_for_the_next_chunk_is_charged():
    """On the last stage a gradient waits for its chunk while others run; stages at which nothing turns keep none."""
    plan = make_plan(((0,), (0,)), 5)
    kept = _Execution(plan, 3).kept
    assert set(kept) == {(1, 0)} and sum(sign for _, sign in kept[1, 0]) == 0
    sizes = MessageSizes(activation_bytes=100, targets_bytes=0, stash_bytes=(0,) * 4, deferred_bytes=(0,) * 4)
    charged = [change for replica, _, change in _byte_changes(plan, _Execution(plan, 3), sizes) if replica == (1, 0)]
    assert charged.count(100) == 5 * (2 + 2 + 2) and sum(charged) == 0  # received, sent and kept, there and back


@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "rule"), [(2, 3, "needs 2"), (2, 1, "needs 2"), (1, 2, "pp_size is 1")]
)
def test_grids_that_it_does_not_fit(num_stages, num_chunks, rule):
    broken = SCHEDULES["zb-v"].find_broken_rule(num_stages, num_chunks)
    assert broken is not None and rule in broken.rule
