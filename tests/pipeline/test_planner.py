"""Routes, and lists: the textbook's on straight grids, right and free of deadlock on damaged ones."""

from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.errors import ScheduleError
from parallel3d.pipeline.check import check_plan
from parallel3d.pipeline.instructions import Op, instructions_for
from parallel3d.pipeline.planner import PlanRequest, plan_pipeline, plan_routes


def make_request(replicas, num_micro_batches, *, rule="1f1b", forward=1, backward=2, **options):
    return PlanRequest(
        replicas=replicas,
        num_micro_batches=num_micro_batches,
        rule=rule,
        forward_costs=(forward,) * len(replicas),
        backward_costs=(backward,) * len(replicas),
        **options,
    )


def textbook(rule, num_stages, stage, mine):
    """The computes of one stage for its micro-batches, written down as the papers do."""
    forwards, backwards = [("F", m) for m in mine], [("B", m) for m in mine]
    if rule == "forward":
        return forwards
    if rule == "gpipe":
        return forwards + backwards
    warmup = min(num_stages - 1 - stage, len(mine))
    steady = [step for pair in zip(forwards[warmup:], backwards) for step in pair]
    return forwards[:warmup] + steady + backwards[len(mine) - warmup :]


def with_messages(computes, route, stage, trains):
    """Receives right before the compute that needs them, sends right after the one that made the value."""
    steps = []
    for kind, micro_batch in computes:
        every = instructions_for(route, micro_batch, stage, backward=trains)
        cut = next((i for i, step in enumerate(every) if step.op in (Op.RECV_GRADIENT, Op.BACKWARD)), len(every))
        steps += every[:cut] if kind == "F" else every[cut:]
    return steps


straight_grids = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 40), st.sampled_from([(1, 1), (1, 2)]))


@st.composite
def damaged_grids(draw):
    """Replicas by stage after losses: ids with gaps, at least one replica at every stage."""
    ids = st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True)
    return tuple(tuple(draw(ids)) for _ in range(draw(st.integers(1, 6))))


def most_unread(plan):
    """For each ordered pair, the most messages in its slots at one moment of the simulated run; not the targets."""
    computes = {(event.op, event.replica[0], event.micro_batch): event for event in plan.events}
    changes = defaultdict(list)
    for (op, stage, micro_batch), event in computes.items():
        reader = computes.get((op, stage + (1 if op is Op.FORWARD else -1), micro_batch))
        if reader:
            changes[event.replica, reader.replica] += [(event.end, 1), (reader.start, -1)]
    return {pair: max(accumulate(change for _, change in sorted(times))) for pair, times in changes.items()}


# --- routes -----------------------------------------------------------------------------------------------------------


@given(damaged_grids(), st.integers(1, 60))
def test_routes_keep_homes_and_spread_orphans_evenly(replicas, num_micro_batches):
    routes = plan_routes(replicas, num_micro_batches)
    homes = sorted(set().union(*replicas))
    assert len(routes) == num_micro_batches
    for micro_batch, route in enumerate(routes):
        home = homes[micro_batch % len(homes)]
        assert len(route) == len(replicas)
        for ids, replica in zip(replicas, route):
            assert replica in ids
            assert replica == home or home not in ids
    for stage, ids in enumerate(replicas):
        loads = Counter(route[stage] for route in routes)
        assert max(loads[replica] for replica in ids) - min(loads[replica] for replica in ids) <= 1


def test_only_orphans_leave_home():
    routes = plan_routes(((0, 1, 2), (0, 2), (0, 1, 2)), 6)
    assert routes == ((0, 0, 0), (1, 0, 1), (2, 2, 2), (0, 0, 0), (1, 2, 1), (2, 2, 2))


# --- straight grids ---------------------------------------------------------------------------------------------------


@given(straight_grids, st.sampled_from(["1f1b", "gpipe", "forward"]), st.sampled_from([1, 2, 3, 100]))
def test_straight_grids_have_the_textbooks_lists(grid, rule, slots):
    num_stages, width, num_micro_batches, (forward, backward) = grid
    replicas = (tuple(range(width)),) * num_stages
    request = make_request(replicas, num_micro_batches, rule=rule, forward=forward, backward=backward, slots=slots)
    plan = plan_pipeline(request)
    for (stage, replica), steps in plan.lists.items():
        mine = range(replica, num_micro_batches, width)
        computes = textbook(rule, num_stages, stage, mine)
        expected = with_messages(computes, (replica,) * num_stages, stage, rule != "forward")
        if slots < num_stages:  # then targets are read early, to free a slot of their pair
            steps = [step for step in steps if step.op is not Op.RECV_TARGETS]
            expected = [step for step in expected if step.op is not Op.RECV_TARGETS]
        assert list(steps) == expected


@given(straight_grids)
def test_straight_grids_have_the_textbooks_bubble(grid):
    num_stages, width, rounds, (forward, backward) = grid
    replicas = (tuple(range(width)),) * num_stages
    for rule in ("1f1b", "gpipe"):
        request = make_request(replicas, rounds * width, rule=rule, forward=forward, backward=backward)
        plan = plan_pipeline(request)
        assert plan.makespan == (rounds + num_stages - 1) * (forward + backward)
        assert Fraction(plan.bubble).limit_denominator(1000) == Fraction(num_stages - 1, rounds + num_stages - 1)


def test_bubble_of_8_stages_and_32_micro_batches():
    assert plan_pipeline(make_request(((0,),) * 8, 32)).bubble == pytest.approx(0.179, abs=5e-4)


def test_targets_do_not_hold_up_a_deep_pipeline():
    """The first stage runs 16 micro-batches ahead; with one slot it still never waits for the last one to read."""
    plan = plan_pipeline(make_request(((0,),) * 16, 64, slots=1))
    assert plan.makespan == (64 + 15) * 3
    assert check_plan(plan, slots=1).makespan == plan.makespan


# --- damaged grids ----------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    damaged_grids(),
    st.integers(1, 40),
    st.sampled_from(["1f1b", "gpipe", "forward"]),
    st.integers(1, 4),
    st.integers(0, 2),
    st.data(),
)
def test_damaged_grids_have_sound_plans(replicas, num_micro_batches, rule, slots, extra, data):
    costs = st.tuples(*[st.integers(1, 4)] * len(replicas))
    request = PlanRequest(
        replicas=replicas,
        num_micro_batches=num_micro_batches,
        rule=rule,
        forward_costs=data.draw(costs),
        backward_costs=data.draw(costs),
        slots=slots,
        extra_in_flight=extra,
    )
    plan = plan_pipeline(request)
    report = check_plan(plan, slots)
    if slots > 1 or len(replicas) != 2:  # two stages and one slot: an activation may wait for its targets to be read
        assert report.makespan <= plan.makespan
    if rule == "1f1b":
        assert all(held <= len(replicas) - stage + extra for (stage, _), held in report.peak_in_flight.items())
    assert list(plan.events) == sorted(plan.events, key=lambda event: (event.start, event.replica))
    assert all(most <= max(slots, 2 * (len(replicas) == 2)) for most in most_unread(plan).values())
    work = Counter()
    for event in plan.events:
        assert (
            event.end - event.start
            == (request.forward_costs if event.op is Op.FORWARD else request.backward_costs)[event.replica[0]]
        )
        work[event.replica] += event.end - event.start
    assert plan.busy == {replica: work[replica] for replica in plan.lists}


def test_more_in_flight_fills_the_bubbles_that_rerouting_makes():
    damaged = ((0, 1, 2, 3), (0, 1, 3), (0, 1, 2, 3), (0, 1, 2, 3))
    spans = [plan_pipeline(make_request(damaged, 32, extra_in_flight=extra)).makespan for extra in range(3)]
    dropping_the_pipeline = plan_pipeline(make_request(((0, 1, 3),) * 4, 32)).makespan
    assert spans == [50, 47, 41]
    assert spans[2] < dropping_the_pipeline == 42
    assert plan_pipeline(make_request(damaged, 32)).bubble == pytest.approx(1 - 33 / 50)  # of the 11 that stage 1 has


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
    assert again.lists == plan.lists
    assert again.digest == plan.digest
    assert plan_pipeline(make_request(replicas, num_micro_batches + 1)).digest != plan.digest


@pytest.mark.parametrize(
    ("rule", "digest"), [("1f1b", "0a9037c2849267e76e3977d25138377f"), ("gpipe", "4cf7f62e9afe632c7042ffc00a41e5b7")]
)
def test_the_digest_is_the_same_on_every_machine(rule, digest):
    replicas = ((0, 1, 2, 3), (3, 0), (1, 2), (0, 1, 2, 3))
    assert plan_pipeline(make_request(replicas, 16, rule=rule)).digest == digest


def test_two_stages_share_a_pair_for_targets_and_activations():
    """With two slots the second micro-batch is loaded when the last stage has read the first."""
    request = make_request(((0,), (0,)), 4, rule="forward", forward=3, slots=2)
    starts = [event.start for event in plan_pipeline(request).events if event.replica == (0, 0)]
    assert starts == [0, 3, 6, 9]
    slow_reader = replace(request, forward_costs=(1, 5))
    starts = [event.start for event in plan_pipeline(slow_reader).events if event.replica == (0, 0)]
    assert starts == [0, 1, 6, 11]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"replicas": ((0,), ())}, "a stage has no replica"),
        ({"replicas": ((0,), (1, 1))}, "stands twice"),
        ({"num_micro_batches": 0}, "0 micro-batches"),
        ({"rule": "zigzag"}, "unknown rule 'zigzag'"),
        ({"forward_costs": (1,)}, "1 forward costs, 2 stages"),
        ({"backward_costs": (1, 0)}, "costs less than 1"),
        ({"slots": 0}, "0 slots"),
        ({"extra_in_flight": -1}, "extra_in_flight -1"),
    ],
)
def test_requests_that_make_no_sense(wrong, message):
    right = {
        "replicas": ((0,), (0,)),
        "num_micro_batches": 2,
        "rule": "1f1b",
        "forward_costs": (1, 1),
        "backward_costs": (1, 1),
    }
    with pytest.raises(ScheduleError, match=message):
        PlanRequest(**right | wrong)
