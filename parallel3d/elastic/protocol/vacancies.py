"""Which live workers fill the vacancies of a grid. Pure.

A stage has a vacancy as long as it has fewer replicas than its target. A candidate is a live worker outside the grid;
it can only serve as the part of the model that it has built: a stage and a tensor-parallel rank. Vacancies are filled
by whole replicas. So the workers that are left of two broken replicas may make a whole one::

    stage 0: replica 0 = 0 1   replica 1 = 2 3      after the loss of ranks 0 and 3      replica 0 = 2 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from parallel3d.parallel.grid import Grid, PartId


def fill(
    grid: Grid,
    *,
    tp_size: int,
    target: Sequence[int],
    candidates: Mapping[int, PartId],
    hosts: Mapping[int, str],
    holders: Grid,
) -> Grid:
    """Returns `grid` with as many of its vacancies filled as the candidates can fill, the narrowest stage first.

    `target` are the replicas that each stage should have. Candidates that `holders`, the last committed grid, has come
    first: they hold state. A replica is on one host, that with the fewest replicas of the stage; only a stage that has
    no replica at all takes one from several hosts.
    """
    left = dict(candidates)
    while left:
        widths = [len(stage) for stage in grid.stages]
        for stage in sorted(range(grid.pp_size), key=lambda stage: (widths[stage], stage)):
            pools = _pools(left, stage, tp_size, holders) if widths[stage] < target[stage] else []
            if ranks := _choose_replica(grid, stage, pools, hosts):
                break
        else:
            return grid
        replica = next(number for number in range(widths[stage] + 1) if number not in grid.stages[stage])
        grid = grid.with_replica((stage, replica), ranks)
        left = {rank: part for rank, part in left.items() if rank not in ranks}
    return grid


def choose_part(grid: Grid, *, tp_size: int, target: Sequence[int], candidates: Iterable[PartId]) -> PartId | None:
    """Returns the part that a new worker should build, given those of the candidates; None if none is missing."""
    built = Counter(candidates)
    parts = [(stage, tp) for stage in range(grid.pp_size) for tp in range(tp_size)]
    widths = {part: len(grid.stages[part[0]]) + built[part] for part in parts}
    missing = [part for part in parts if widths[part] < target[part[0]]]
    return min(missing, key=lambda part: (widths[part], part), default=None)


def _pools(candidates: Mapping[int, PartId], stage: int, tp_size: int, holders: Grid) -> list[list[int]]:
    """The candidates for each tensor-parallel rank of a replica of `stage`, the best first."""
    pools: list[list[int]] = [[] for _ in range(tp_size)]
    for rank, (at, tp) in sorted(candidates.items(), key=lambda item: (not holders.holds(item[0]), item[0])):
        if at == stage:
            pools[tp].append(rank)
    return pools


def _choose_replica(
    grid: Grid, stage: int, pools: Sequence[Sequence[int]], hosts: Mapping[int, str]
) -> tuple[int, ...]:
    """The ranks of a new replica of `stage`, one of each pool; () if there is none."""
    if not pools or not all(pools):
        return ()
    used = Counter(hosts.get(ranks[0], "") for ranks in grid.stages[stage].values())
    on_host = [{hosts.get(rank, ""): rank for rank in reversed(pool)} for pool in pools]
    shared = [host for host in on_host[0] if all(host in firsts for firsts in on_host)]
    if shared:
        best = min(shared, key=lambda host: (used[host], host))
        return tuple(firsts[best] for firsts in on_host)
    return () if grid.stages[stage] else tuple(pool[0] for pool in pools)
