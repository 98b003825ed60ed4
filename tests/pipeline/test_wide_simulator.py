"""The simulation of all replicas at once gives the runs of the one that starts one compute after the other."""

from __future__ import annotations

import random

import pytest

from parallel3d.pipeline import wide_simulator
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import choose_plan, plan_pipeline
from parallel3d.pipeline.request import PlanRequest
from parallel3d.pipeline.routes import plan_routes, split_components
from parallel3d.pipeline.simulator import simulate
from parallel3d.pipeline.wide_simulator import fits_all_at_once, simulate_all_at_once


def random_request(seed: int) -> PlanRequest:
    """A damaged grid; many of those with one or two slots have computes that wait."""
    draw = random.Random(seed)
    num_stages, width = draw.randint(3, 6), draw.randint(2, 5)
    costs = [tuple(draw.randint(1, 4) for _ in range(num_stages)) for _ in range(3)]
    return PlanRequest(
        replicas=tuple(tuple(sorted(draw.sample(range(width), draw.randint(1, width)))) for _ in range(num_stages)),
        num_micro_batches=draw.randint(1, 40),
        schedule="1f1b",
        costs=StageCosts(forward=costs[0], backward_input=costs[1], backward_weight=costs[2]),
        slots=draw.choice([1, 2, 3, 3, 8]),
        split_backward=draw.random() < 0.5,
        extra_in_flight=draw.randint(0, 3),
    )


@pytest.mark.parametrize("first", range(0, 90, 30))
def test_runs_are_equal(first):
    num_equal = 0
    for seed in range(first, first + 30):
        request = random_request(seed)
        for component in split_components(plan_routes(request)):
            expected, found = simulate(request, component.shape), simulate_all_at_once(request, component.shape)
            if found is None:  # a slot was full
                continue
            assert (found.makespan, list(found.steps)) == (expected.makespan, list(expected.steps)), seed
            assert found.virtual_micro_batches == expected.virtual_micro_batches
            for limit in (expected.makespan // 2, expected.makespan - 1):
                late = simulate_all_at_once(request, component.shape, limit)
                assert late == simulate(request, component.shape, limit) and isinstance(late, int), seed
            num_equal += 1
    assert num_equal > 12


def test_a_full_slot_ends_the_attempt():
    """Stage 1 is slow, so that the only slot of the pair before it is full; the plan is made the other way."""
    costs = StageCosts(forward=(1, 5, 1), backward_input=(1, 5, 1), backward_weight=(1, 5, 1))
    request = PlanRequest(
        replicas=((0,), (0,), (0,)), num_micro_batches=8, schedule="1f1b", costs=costs, slots=1, extra_in_flight=3
    )
    (component,) = split_components(plan_routes(request))
    assert simulate_all_at_once(request, component.shape) is None
    assert plan_pipeline(request).makespan == simulate(request, component.shape).makespan


def test_plans_are_equal(monkeypatch):
    lost = {(1, 2), (2, 0)}
    replicas = tuple(tuple(d for d in range(4) if (p, d) not in lost) for p in range(4))
    request = PlanRequest(replicas=replicas, num_micro_batches=32, schedule="1f1b", costs=StageCosts.equal(4))
    plans = []
    for min_replicas in (1, 1000):
        monkeypatch.setattr(wide_simulator, "MIN_REPLICAS", min_replicas)
        plans.append(choose_plan(request, may_split=True, max_extra_in_flight=2))
    assert plans[0].digest == plans[1].digest and plans[0].candidates == plans[1].candidates
    assert dict(plans[0].lists) == dict(plans[1].lists) and plans[0].events == plans[1].events


@pytest.mark.parametrize(
    "schedule, changes, expected",
    [
        ("1f1b", {}, True),
        ("gpipe", {}, False),
        ("zb-h1", {}, True),
        ("interleaved", dict(virtual_stages=2), False),
        ("1f1b", dict(has_backward=False), False),
        ("1f1b", dict(replicas=((0, 1), (0, 1))), False),
    ],
)
def test_where_it_fits(schedule, changes, expected):
    sizes = dict(replicas=((0, 1),) * 4, num_micro_batches=8) | changes
    num_costs = len(sizes["replicas"]) * sizes.get("virtual_stages", 1)
    request = PlanRequest(schedule=schedule, costs=StageCosts.equal(num_costs), **sizes)
    assert fits_all_at_once(request) == expected
