"""Chooses the replica of each micro-batch at each stage, and groups replicas that share micro-batches.

The home of micro-batch m is the (m mod H)-th of the H replica ids found at any stage. A micro-batch keeps its home at
every stage where it is alive; elsewhere it goes to the replica with the least load of that stage, the lowest id first.
Any two replicas of a stage then differ by at most one micro-batch, whatever was lost: homes differ by at most one, and
the least loaded one is filled first.

Where replicas are slow, `routing` "balance" gives each micro-batch to the replica of the stage that would finish it
first. A replica then has a share, and keeps this share of its own micro-batches, evenly over the iteration; the others
go where shares are left.

Replicas that share no micro-batch don't influence each other: the routes fall into connected components, and components
of equal shape run alike. A straight grid costs as much to plan as one of its columns.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush

from parallel3d.pipeline.instructions import ReplicaId
from parallel3d.pipeline.request import PlanRequest, Routes


@dataclass(frozen=True, kw_only=True)
class RouteComponent:
    """Replicas connected by micro-batches. `shape` is its routes in positions: indices into `replicas`."""

    micro_batches: list[int]
    replicas: list[ReplicaId]
    shape: Routes


def plan_routes(request: PlanRequest) -> Routes:
    """Returns routes[micro-batch][stage] = replica id."""
    home_of = home_replicas(request)
    if request.routing == "balance":
        factors = request.time_factors
        stages = [{replica: factors[stage, replica] for replica in ids} for stage, ids in enumerate(request.replicas)]
        return tuple(zip(*(_balance_stage(factor_of, home_of) for factor_of in stages)))
    return tuple(zip(*(_route_stage(ids, home_of) for ids in _replicas_in_use(request))))


def home_replicas(request: PlanRequest) -> tuple[int, ...]:
    """The home of each micro-batch."""
    homes = sorted({replica for ids in _replicas_in_use(request) for replica in ids})
    return tuple(homes[m % len(homes)] for m in range(request.num_micro_batches))


def _replicas_in_use(request: PlanRequest) -> Routes:
    return (request.whole_pipelines,) * request.num_stages if request.routing == "drop" else request.replicas


def split_components(routes: Routes) -> list[RouteComponent]:
    """The connected components; positions keep the order of names, so that equal shapes have equal runs."""
    by_route: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for micro_batch, route in enumerate(routes):
        by_route[route].append(micro_batch)
    parent: dict[ReplicaId, ReplicaId] = {}

    def find(replica: ReplicaId) -> ReplicaId:
        while parent.setdefault(replica, replica) != replica:
            replica = parent[replica]
        return replica

    for route in by_route:
        for replica in enumerate(route):
            parent[find(replica)] = find((0, route[0]))
    groups: dict[ReplicaId, list[tuple[int, ...]]] = defaultdict(list)
    for route in by_route:
        groups[find((0, route[0]))].append(route)
    return [_build_component({route: by_route[route] for route in group}) for group in groups.values()]


def _route_stage(ids: tuple[int, ...], home_of: tuple[int, ...]) -> list[int]:
    """The replica of each micro-batch at a stage with these live replicas."""
    alive = set(ids)
    kept = Counter(home for home in home_of if home in alive)
    loads = sorted((kept[replica], replica) for replica in ids)  # a sorted list is a heap
    column = list(home_of)
    for micro_batch, home in enumerate(home_of):
        if home not in alive:
            load, replica = heappop(loads)
            heappush(loads, (load + 1, replica))
            column[micro_batch] = replica
    return column


def _balance_stage(factor_of: dict[int, int], home_of: tuple[int, ...]) -> list[int]:
    """The replica of each micro-batch at a stage whose replicas need these times for one."""
    share = fill_by_finish_time(factor_of, len(home_of))
    own = Counter(home_of)
    seen: Counter[int] = Counter()
    column, moved = list(home_of), []
    left = dict(share)
    for micro_batch, home in enumerate(home_of):
        kept = min(own[home], share.get(home, 0))
        seen[home] += 1
        if seen[home] * kept // own[home] > (seen[home] - 1) * kept // own[home]:
            left[home] -= 1
        else:
            moved.append(micro_batch)
    finish_times = sorted((factor_of[replica], replica) for replica in left if left[replica])
    for micro_batch in moved:
        time, replica = heappop(finish_times)
        column[micro_batch] = replica
        left[replica] -= 1
        if left[replica]:
            heappush(finish_times, (time + factor_of[replica], replica))
    return column


def fill_by_finish_time(factor_of: dict[int, int], num_micro_batches: int) -> dict[int, int]:
    """The number of micro-batches of each replica, each given to the one that finishes it first.

    No other numbers end sooner.
    """
    finish_times = sorted((factor, replica) for replica, factor in factor_of.items())  # a sorted list is a heap
    share = dict.fromkeys(factor_of, 0)
    for _ in range(num_micro_batches):
        time, replica = heappop(finish_times)
        share[replica] += 1
        heappush(finish_times, (time + factor_of[replica], replica))
    return share


def _build_component(by_route: dict[tuple[int, ...], list[int]]) -> RouteComponent:
    replicas = sorted({replica for route in by_route for replica in enumerate(route)})
    position = {replica: i for i, replica in enumerate(replicas)}
    in_positions = {
        micro_batch: route
        for names, micro_batches in by_route.items()
        for route in [tuple([position[replica] for replica in enumerate(names)])]
        for micro_batch in micro_batches
    }
    micro_batches = sorted(in_positions)
    return RouteComponent(
        micro_batches=micro_batches, replicas=replicas, shape=tuple(map(in_positions.__getitem__, micro_batches))
    )
