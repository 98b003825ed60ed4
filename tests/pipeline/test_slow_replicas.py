"""Slow replicas: who counts as slow, shares by finish time, and plans that are never slower for knowing it."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from math import exp, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.errors import ScheduleError
from parallel3d.pipeline.check import check_plan
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import plan_pipeline
from parallel3d.pipeline.request import NORMAL, PlanRequest
from parallel3d.pipeline.routes import fill_by_finish_time, plan_routes, split_components
from parallel3d.pipeline.simulator import simulate
from parallel3d.pipeline.slow_plan import choose_plan_for_slow, true_makespan
from parallel3d.pipeline.slow_replicas import HOLD, PATIENCE, WINDOW, ReplicaSpeeds
from parallel3d.pipeline.wide_simulator import simulate_all_at_once
from tests.support.damaged_grids import damaged_grids
from tests.support.plan_requests import choose, lose, make_request
from tests.support.tiers import examples

# --- who is slow ------------------------------------------------------------------------------------------------------

STAGE = [(0, replica) for replica in range(4)]


def after(speeds: ReplicaSpeeds, num_steps: int, *times: float) -> ReplicaSpeeds:
    for _ in range(num_steps):
        speeds = speeds.after(dict(zip(STAGE, times)))
    return speeds


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_stages", "width"), [(1, 2), (8, 2), (1, 4), (1, 16), (4, 16), (1, 64), (1, 256)])
def test_noise_is_not_slowness(num_stages: int, width: int, seed: int):
    """1,000 steps of equal replicas, each off by 10 % (one standard deviation): the plan never changes."""
    noise, speeds = random.Random(seed), ReplicaSpeeds()
    grid = (tuple(range(width)),) * num_stages
    stages = [(stage, replica) for stage, ids in enumerate(grid) for replica in ids]
    for step in range(1_000):
        speeds = speeds.after({replica: noise.lognormvariate(0, 0.1) for replica in stages})
        assert speeds.of_grid(grid) == (), step


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("correlation", "most"), [(0.5, 5), (0.8, 50), (0.9, 50), (0.95, 50)])
def test_noise_that_lasts_changes_the_plan_seldom(correlation: float, most: int, seed: int):
    """Four equal replicas, each off by 10 % for some steps: a plan in 20 steps at most, and the routes come back."""
    noise, speeds, changes, last = random.Random(seed), ReplicaSpeeds(), 0, None
    states = [noise.gauss(0, 1) for _ in STAGE]
    for _ in range(1_000):
        states = [correlation * each + sqrt(1 - correlation**2) * noise.gauss(0, 1) for each in states]
        speeds = speeds.after({replica: exp(0.1 * each) for replica, each in zip(STAGE, states)})
        changes, last = changes + (last is not None and speeds.slowness != last), speeds.slowness
    assert (correlation < 0.8 or changes >= 1) and changes <= most
    assert after(speeds, WINDOW + HOLD, 1, 1, 1, 1).of_grid(((0, 1, 2, 3),)) == ()


@pytest.mark.each_value
@pytest.mark.parametrize("num_slow", [1, 8, 15])
@pytest.mark.parametrize("seed", range(3))
def test_slow_replicas_are_found_in_noise(num_slow: int, seed: int):
    """Also where most of a stage is slow: the few that are fast are the measure. Each is found, and no other one."""
    noise, speeds = random.Random(seed), ReplicaSpeeds()
    for _ in range(100):
        speeds = speeds.after({(0, r): noise.lognormvariate(0, 0.1) * (2 if r < num_slow else 1) for r in range(16)})
    assert set(speeds.slowness) == {(0, replica) for replica in range(num_slow)}
    assert all(abs(factor - 2 * NORMAL) < NORMAL / 2 for factor in speeds.slowness.values())


def test_one_that_is_nearly_as_fast_is_no_measure():
    """The measure is the middle of those within 15 % of the fastest, the lower one of two."""
    assert after(ReplicaSpeeds(), WINDOW, 1, 1.1, 1.14, 2.2).slowness == {(0, 3): 32}
    assert after(ReplicaSpeeds(), WINDOW, 1, 1.1, 1.2, 2.2).slowness == {(0, 3): 35}
    assert after(ReplicaSpeeds(), WINDOW, 1, 1.2, 2, 2).slowness == {(0, 2): 32, (0, 3): 32}


def test_a_slow_replica_is_found_and_forgiven():
    """After half of a window in which it was slow; then it stays as it is for a while."""
    speeds = after(ReplicaSpeeds(), 30, 1, 1, 1, 1)
    assert after(speeds, WINDOW // 2, 1, 1, 1, 2).of_grid(((0, 1, 2, 3),)) == ()
    speeds = after(speeds, WINDOW // 2 + 1, 1, 1, 1, 2)
    assert speeds.of_grid(((0, 1, 2, 3),)) == ((16, 16, 16, 32),)
    speeds = after(speeds, HOLD - 1, 1, 1, 1, 4)
    assert speeds.of_grid(((0, 1, 2, 3),)) == ((16, 16, 16, 32),)
    speeds = after(speeds, 1, 1, 1, 1, 4)
    assert speeds.of_grid(((0, 1, 2, 3),)) == ((16, 16, 16, 64),)
    assert after(speeds, HOLD + WINDOW, 1, 1, 1, 1).of_grid(((0, 1, 2, 3),)) == ()


def test_stages_are_measured_apart():
    """A stage with more work is not slow."""
    times = {(0, 0): 1.0, (0, 1): 1.5, (1, 0): 5.0, (1, 1): 5.1}
    speeds = ReplicaSpeeds()
    for _ in range(WINDOW):
        speeds = speeds.after(times)
    assert speeds.of_grid(((0, 1), (0, 1))) == ((16, 24), (16, 16))
    assert speeds.of_grid(((1,), (0, 1))) == ()  # without the faster one there is nothing to compare with


@pytest.mark.parametrize("time", [0.0, float("nan"), float("inf"), -1.0])
def test_a_step_without_a_time_says_nothing(time: float):
    known = after(ReplicaSpeeds(), WINDOW, 1, 1, 1, 2)
    assert after(known, 1, 1, 1, 1, time).recent[0, 3] == known.recent[0, 3]
    assert after(known, PATIENCE - 1, 1, 1, 1, time).of_grid(((0, 1, 2, 3),)) == ((16, 16, 16, 32),)


def test_one_that_is_too_slow_for_work_is_tried_again():
    """It is taken for half as slow from time to time, until work shows what it is."""
    known = after(ReplicaSpeeds(), WINDOW, 1, 1, 1, 40)
    assert known.slowness == {(0, 3): 640}
    idle = after(known, PATIENCE, 1, 1, 1, 0)
    assert idle.slowness == {(0, 3): 320} and idle.recent[0, 3] == ()
    assert after(idle, PATIENCE - 1, 1, 1, 1, 0).slowness == {(0, 3): 320}
    assert after(idle, PATIENCE, 1, 1, 1, 0).slowness == {(0, 3): 160}
    assert after(after(idle, 50, 1, 1, 1, 0), PATIENCE - 1, 1, 1, 1, 0).slowness == {(0, 3): 160}  # a step without work
    assert after(idle, WINDOW, 1, 1, 1, 40).slowness == {(0, 3): 640}
    assert after(idle, WINDOW, 1, 1, 1, 1).slowness == {}
    assert after(after(idle, 1, 1, 1, 1, 40), PATIENCE - 1, 1, 1, 1, 0).slowness == {(0, 3): 320}  # it had work


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 1.23e-5]), min_size=3, max_size=4), max_size=150))
def test_speeds_travel(steps: list[list[float]]):
    """To workers that join: as text, without a difference, and with the same future."""
    speeds = ReplicaSpeeds()
    for times in steps:
        speeds = speeds.after(dict(zip(STAGE, times)))
    arrived = ReplicaSpeeds.from_json(json.loads(json.dumps(speeds.to_json())))
    assert arrived == speeds and arrived.to_json() == speeds.to_json()


def test_who_has_left_is_forgotten():
    known = after(ReplicaSpeeds(), WINDOW, 1, 1, 1, 2)
    back = after(after(known, 1, 1, 1, 1), 1, 1, 1, 1, 1)
    assert back.of_grid(((0, 1, 2, 3),)) == () and not back.held


# --- shares -----------------------------------------------------------------------------------------------------------

factors = st.lists(st.integers(NORMAL, 200), min_size=1, max_size=8)


@given(factors, st.integers(0, 100))
def test_no_shares_end_sooner(times: list[int], num_micro_batches: int):
    share = fill_by_finish_time(dict(enumerate(times)), num_micro_batches)
    assert sum(share.values()) == num_micro_batches
    end = max(share[replica] * time for replica, time in enumerate(times))
    assert sum((end - 1) // time for time in times) < num_micro_batches or not num_micro_batches


@given(damaged_grids(max_stages=4), st.integers(1, 40), st.randoms(use_true_random=False))
def test_balanced_routes(replicas: tuple[tuple[int, ...], ...], num_micro_batches: int, draw: random.Random):
    """Each stage's shares are those by finish time; as many micro-batches as can be are at home."""
    slowness = tuple(tuple(draw.choice([16, 16, 20, 64]) for _ in ids) for ids in replicas)
    request = replace(make_request(replicas, num_micro_batches), slowness=slowness, routing="balance")
    routes, homes = plan_routes(request), sorted(set().union(*replicas))
    own = Counter(homes[m % len(homes)] for m in range(num_micro_batches))
    for stage, (ids, times) in enumerate(zip(replicas, slowness)):
        share = fill_by_finish_time(dict(zip(ids, times)), num_micro_batches)
        assert Counter(route[stage] for route in routes) == Counter(share)
        at_home = sum(route[stage] == homes[m % len(homes)] for m, route in enumerate(routes))
        assert at_home == sum(min(own[replica], share[replica]) for replica in ids)


def test_what_a_slow_replica_keeps_is_spread_over_the_iteration():
    request = replace(make_request(lose(1, 2), 16), slowness=((16, 48),), routing="balance")
    kept = [m for m, route in enumerate(plan_routes(request)) if route == (1,)]
    assert kept == [3, 7, 11, 15]


# --- plans ------------------------------------------------------------------------------------------------------------


def slow_request(num_stages: int, width: int, num_micro_batches: int, slow: dict[tuple[int, int], int]) -> PlanRequest:
    request = make_request(lose(num_stages, width), num_micro_batches)
    slowness = tuple(tuple(slow.get((stage, d), NORMAL) for d in range(width)) for stage in range(num_stages))
    return replace(request, slowness=slowness)


def unknown_makespan(request: PlanRequest) -> int:
    """The true time of those who do not know who is slow."""
    return true_makespan(choose(replace(request, slowness=())), request)


def test_one_of_four_is_twice_as_slow():
    """32 micro-batches: 16 times that of one become 10; the bound is 32 / 3.5, without the replica it is 11."""
    request = slow_request(1, 4, 32, {(0, 3): 2 * NORMAL})
    unit = 3 * NORMAL  # forward and both halves of a backward
    assert unknown_makespan(request) == 16 * unit
    plan = choose(request)
    assert plan.makespan == 10 * unit
    assert plan.busy == {(0, 0): 10 * unit, (0, 1): 9 * unit, (0, 2): 9 * unit, (0, 3): 8 * unit}
    assert choose(make_request(lose(1, 4, (0, 3)), 32)).makespan == 11 * 3


@pytest.mark.parametrize(
    ("num_stages", "width", "slow", "unknown", "known", "evicted"),
    [
        (4, 4, {(1, 2): 32}, 53, 31, 34),
        (4, 4, {(0, 3): 48}, 72, 31, 34),
        (2, 4, {(0, 0): 32, (1, 3): 24}, 49, 33, 35),
    ],
)
def test_slow_replicas_of_pipelines(
    num_stages: int, width: int, slow: dict[tuple[int, int], int], unknown: int, known: int, evicted: int
):
    """In units of a forward pass; knowing beats evicting, too."""
    request = slow_request(num_stages, width, 32, slow)
    assert unknown_makespan(request) == unknown * NORMAL
    plan = choose(request)
    assert plan.makespan == known * NORMAL and "balance" in plan.reason
    assert choose(make_request(lose(num_stages, width, *slow), 32)).makespan == evicted
    check_plan(plan, slots=3)


@pytest.mark.each_value
@pytest.mark.parametrize("factor", [4, 8, 20, 64])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 32), (2, 12), (2, 64), (4, 32)])
def test_knowing_a_very_slow_replica_is_not_slower_than_evicting_it(
    num_stages: int, num_micro_batches: int, factor: int
):
    """Where other stages would wait for what it computes, it gets nothing."""
    at = (num_stages - 1, 1)
    request = slow_request(num_stages, 4, num_micro_batches, {at: factor * NORMAL})
    plan = choose_plan_for_slow(request, may_split=True, max_extra_in_flight=2)
    evicted = choose(make_request(lose(num_stages, 4, at), num_micro_batches))
    assert true_makespan(plan, request) <= evicted.makespan * NORMAL


@pytest.mark.parametrize("knows", [True, False])
def test_a_plan_is_timed_by_one_component_of_each_kind(knows: bool):
    """As by the lists of all replicas; pipelines that run alike in the plan may differ in the true times."""
    slow = {(1, 2): 24, (2, 5): 40, (0, 9): 24}
    whole = slow_request(3, 16, 64, slow)
    slowness = (whole.slowness[0][:-1], *whole.slowness[1:])
    request = replace(whole, replicas=lose(3, 16, (0, 15)), slowness=slowness)
    plan = choose(request if knows else replace(request, slowness=()))
    timed = replace(plan, request=replace(plan.request, slowness=request.slowness))
    by_kinds, by_all = true_makespan(plan, request), check_plan(timed, slots=3).makespan
    num_components, num_kinds = len(plan.runs), len({id(run) for _, run in plan.runs})
    assert by_kinds == by_all and num_kinds < num_components


SCHEDULES = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "interleaved": 2, "zb-v": 2}


def random_slow_request(seed: int, schedule: str) -> PlanRequest | None:
    """A grid with losses and slow replicas; None if a stage has lost all or none is slow."""
    draw, chunks = random.Random(seed), SCHEDULES[schedule]
    num_stages, width = draw.randint(chunks, 4), draw.randint(1, 4)
    lost = [(stage, d) for stage in range(num_stages) for d in range(width) if draw.random() < 0.15]
    replicas = lose(num_stages, width, *lost)
    costs = [tuple(draw.randint(1, 4) for _ in range(num_stages * chunks)) for _ in range(3)]
    slowness = tuple(tuple(draw.choice([16, 16, 16, 20, 32, 64]) for _ in ids) for ids in replicas)
    if not all(replicas) or max(map(max, slowness)) == NORMAL:
        return None
    return PlanRequest(
        replicas=replicas,
        num_micro_batches=draw.randint(1, 24),
        schedule=schedule,
        virtual_stages=chunks,
        costs=StageCosts(forward=costs[0], backward_input=costs[1], backward_weight=costs[2]),
        slots=draw.randint(1, 4),
        slowness=slowness,
    )


@pytest.mark.each_value
@pytest.mark.parametrize("first", range(0, 60, 20))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_knowing_is_never_slower(schedule: str, first: int):
    """Than the lists of those who do not know; seldom has it to fall back on these."""
    num_faster = num_fallbacks = 0
    for seed in range(first, first + 20):
        if (request := random_slow_request(seed, schedule)) is None:
            continue
        plan = choose_plan_for_slow(request, may_split=True, max_extra_in_flight=2)
        known, unknown = true_makespan(plan, request), unknown_makespan(request)
        assert known <= unknown, seed
        num_faster += known < unknown
        num_fallbacks += not plan.request.slowness
    assert num_faster >= 4 and num_fallbacks <= 3


@given(st.integers(0, 10_000), st.randoms(use_true_random=False))
@settings(max_examples=examples(40))
def test_all_ranks_plan_alike(seed: int, shuffle: random.Random):
    """The order in which replicas are named changes nothing."""
    if (request := random_slow_request(seed, "1f1b")) is None:
        return
    orders = [shuffle.sample(range(len(ids)), len(ids)) for ids in request.replicas]
    named, slow = (
        tuple(tuple(stage[i] for i in order) for stage, order in zip(field, orders))
        for field in (request.replicas, request.slowness)
    )
    plan, other = choose(request), choose(replace(request, replicas=named, slowness=slow))
    assert (plan.digest, plan.makespan) == (other.digest, other.makespan)


def test_a_grid_without_slow_replicas_is_planned_as_before():
    for grid in (lose(3, 3), lose(3, 3, (1, 1))):
        request = make_request(grid, 12)
        normal = replace(request, slowness=tuple((NORMAL,) * len(ids) for ids in grid))
        assert choose(normal) == choose(request)


def test_the_wide_simulation_knows_slow_replicas():
    num_equal = 0
    for seed in range(20):
        draw = random.Random(seed)
        request = slow_request(
            4, 4, 24, {(draw.randrange(4), draw.randrange(4)): draw.randint(17, 64) for _ in range(3)}
        )
        request = replace(request, routing="balance", split_backward=seed % 2 == 1, slots=8)
        for component in split_components(plan_routes(request)):
            times = tuple(request.time_factors[replica] for replica in component.replicas)
            found = simulate_all_at_once(request, component.shape, factors=times)
            if found is not None:
                expected = simulate(request, component.shape, factors=times)
                assert (found.makespan, list(found.steps)) == (expected.makespan, list(expected.steps)), seed
                num_equal += 1
    assert num_equal > 10


@pytest.mark.parametrize("slowness", [((16,),), ((16, 16), (16, 15)), ((16, 16), (16,))])
def test_slowness_that_cannot_be(slowness: tuple[tuple[int, ...], ...]):
    with pytest.raises(ScheduleError, match="slowness"):
        replace(make_request(lose(2, 2), 4), slowness=slowness)


def test_times_of_events():
    plan = plan_pipeline(slow_request(2, 1, 3, {(1, 0): 24}))
    assert {(event.replica[0], event.end - event.start) for event in plan.events} == {
        (0, 16),
        (0, 32),
        (1, 24),
        (1, 48),
    }
    assert max(event.end for event in plan.events) == plan.makespan
