"""Which live workers fill the vacancies of a grid. Pure.

A stage has a vacancy as long as it has fewer replicas than its target. A candidate is a live worker outside the grid;
it can only serve as the part of the model that it has built: a stage and a tensor-parallel rank. Vacancies are filled
by whole replicas. So the workers that are left of two broken replicas may make a whole one::

    stage 0: replica 0 = 0 1   replica 1 = 2 3      after the loss of ranks 0 and 3      replica 0 = 2 1

The target may be wider than the grid with which a run began: it then grows, a replica of a stage at a time.

Candidates that are left over may build another part than theirs, where that makes one more replica whole::

    stages 0 and 1 have each lost a replica, spare 1 has built (0, 1), spare 5 (1, 1)      5 builds (0, 0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from parallel3d.parallel.grid import Grid, PartId


@dataclass(frozen=True, kw_only=True)
class GridTarget:
    """How many replicas each stage should have, and which stage gets its next one first."""

    tp_size: int
    widths: tuple[int, ...]
    """Replicas of each stage."""
    costs: tuple[int, ...]
    """Relative time of a micro-batch at each stage."""
    num_micro_batches: int
    """Of a step, over all replicas."""

    @staticmethod
    def of(
        first: Grid, *, max_replicas: int | None = None, costs: Sequence[int] = (), num_micro_batches: int = 0
    ) -> GridTarget:
        """Returns the widths of the run's first grid, or `max_replicas` where that is more. By default all stages
        cost the same, and a step has very many micro-batches."""
        return GridTarget(
            tp_size=first.tp_size,
            widths=tuple(max(len(stage), max_replicas or 0) for stage in first.stages),
            costs=tuple(costs) or (1,) * first.pp_size,
            num_micro_batches=num_micro_batches or _VERY_MANY,
        )

    def widest(self) -> Grid:
        """Returns a grid of this width, whose ranks do not matter."""
        return Grid.of_replicas(self.widths, tp_size=self.tp_size)

    def order(self, stage: int, width: int) -> tuple[int, int, int, int]:
        """Returns a key by which the stage sorts, the first to widen first.

        A stage that could not lose a replica comes first. Of the others the one with the longest time: that is the
        pipeline's, so only its next replica makes steps shorter. Of equal ones the last: it gains most in the planner's
        makespans, of which these times are bounds (docs/experiments.md).
        """
        if width <= 1:
            return (width, 0, 0, stage)
        return (2, -self.costs[stage] * -(-self.num_micro_batches // width), width, -stage)


_VERY_MANY = 1 << 20


def fill(
    grid: Grid,
    *,
    target: GridTarget,
    candidates: Mapping[int, PartId],
    hosts: Mapping[int, str],
    holders: Grid,
) -> Grid:
    """Returns `grid` with as many of its vacancies filled as the candidates can fill, in the order of `target`.

    Candidates that `holders`, the last committed grid, has come first: they hold state. A replica is on one host, that
    with the fewest replicas of the stage; only a stage that has no replica at all takes one from several hosts.
    """
    left = dict(candidates)
    while left:
        widths = [len(stage) for stage in grid.stages]
        for stage in sorted(range(grid.pp_size), key=lambda stage: target.order(stage, widths[stage])):
            pools = _pools(left, stage, target.tp_size, holders) if widths[stage] < target.widths[stage] else []
            if ranks := _choose_replica(grid, stage, pools, hosts):
                break
        else:
            return grid
        replica = next(number for number in range(widths[stage] + 1) if number not in grid.stages[stage])
        grid = grid.with_replica((stage, replica), ranks)
        left = {rank: part for rank, part in left.items() if rank not in ranks}
    return grid


def choose_part(
    grid: Grid, *, target: GridTarget, candidates: Iterable[tuple[PartId, str]], host: str
) -> PartId | None:
    """Returns the part that a new worker on `host` should build; None if no replica is missing.

    `candidates` are the parts and hosts of the others. A replica is on one host: the new worker completes one that
    others have begun on its own; else it begins one of the stage that gains most, even if one is begun elsewhere.
    """
    built = Counter(candidates)
    tp_ranks, hosts = range(target.tp_size), {at for _, at in built}
    missing = {}
    for stage, width in enumerate(target.widths):
        whole = {at: min(built[(stage, tp), at] for tp in tp_ranks) for at in {*hosts, host}}
        if (num_replicas := len(grid.stages[stage]) + sum(whole.values())) < width:
            parts = [(stage, tp) for tp in tp_ranks if built[(stage, tp), host] == whole[host]]
            missing[parts[0]] = len(parts), target.order(stage, num_replicas)
    return min(missing, key=lambda part: (missing[part], part), default=None)


def plan_moves(
    grid: Grid, *, target: GridTarget, idle: Mapping[int, PartId], hosts: Mapping[int, str]
) -> dict[int, PartId]:
    """Returns the parts that some `idle` workers should build instead of theirs, for one more replica of the stage that
    gains most; {} if they are too few.

    `grid` is filled as far as may be. The replica will be on one host, that with the fewest of the stage.
    """
    on_host: dict[str, list[int]] = {}
    for rank in sorted(idle):
        on_host.setdefault(hosts.get(rank, ""), []).append(rank)
    on_host = {host: ranks for host, ranks in on_host.items() if len(ranks) >= target.tp_size}
    narrow = [stage for stage, width in enumerate(target.widths) if len(grid.stages[stage]) < width]
    if not (narrow and on_host):
        return {}
    stage = min(narrow, key=lambda stage: target.order(stage, len(grid.stages[stage])))
    used = Counter(hosts.get(ranks[0], "") for ranks in grid.stages[stage].values())
    plans = {host: _split_stage(ranks, stage, target.tp_size, idle) for host, ranks in on_host.items()}
    return plans[min(plans, key=lambda host: (used[host], len(plans[host]), host))]


def _split_stage(ranks: Iterable[int], stage: int, tp_size: int, idle: Mapping[int, PartId]) -> dict[int, PartId]:
    """The parts of a replica of `stage` that the first of `ranks` should build; those that have built one keep it."""
    kept = {idle[rank]: rank for rank in reversed(list(ranks)) if idle[rank][0] == stage}
    missing = [(stage, tp) for tp in range(tp_size) if (stage, tp) not in kept]
    return dict(zip((rank for rank in ranks if rank not in kept.values()), missing))


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
