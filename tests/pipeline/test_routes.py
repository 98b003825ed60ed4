"""Routes: home where it is alive, orphans spread evenly; and which replicas have to do with each other."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.request import PlanRequest
from parallel3d.pipeline.routes import plan_routes, split_components
from tests.support.damaged_grids import damaged_grids


def routes_of(replicas, num_micro_batches, routing="reroute"):
    costs = StageCosts.equal(len(replicas))
    return plan_routes(
        PlanRequest(
            replicas=replicas, num_micro_batches=num_micro_batches, schedule="1f1b", costs=costs, routing=routing
        )
    )


@given(damaged_grids(), st.integers(1, 60))
def test_routes_keep_homes_and_spread_orphans_evenly(replicas, num_micro_batches):
    routes = routes_of(replicas, num_micro_batches)
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
    routes = routes_of(((0, 1, 2), (0, 2), (0, 1, 2)), 6)
    assert routes == ((0, 0, 0), (1, 0, 1), (2, 2, 2), (0, 0, 0), (1, 2, 1), (2, 2, 2))


def test_dropping_keeps_to_pipelines_that_are_whole():
    assert routes_of(((0, 1, 2), (0, 2), (0, 1, 2)), 4, "drop") == ((0, 0, 0), (2, 2, 2)) * 2


@given(damaged_grids(), st.integers(1, 40))
def test_components_share_nothing_and_leave_nothing_out(replicas, num_micro_batches):
    routes = routes_of(replicas, num_micro_batches)
    components = split_components(routes)
    assert sorted(m for component in components for m in component.micro_batches) == list(range(num_micro_batches))
    used = [replica for component in components for replica in component.replicas]
    assert len(used) == len(set(used))
    for component in components:
        named = [tuple(component.replicas[position] for position in route) for route in component.shape]
        assert named == [tuple(enumerate(routes[m])) for m in component.micro_batches]


def test_whole_columns_have_one_shape():
    components = split_components(routes_of(((0, 1, 2, 3),) * 3, 16))
    assert len(components) == 4 and len({component.shape for component in components}) == 1
