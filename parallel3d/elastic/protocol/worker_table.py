"""The workers of a run as its membership protocol knows them: what they have built, what they could fill. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from parallel3d.elastic.protocol.vacancies import GridTarget, choose_part, fill, plan_moves
from parallel3d.parallel.grid import Grid, PartId


class WorkerTable:
    """Live and new workers, and the committed grid."""

    def __init__(self, grid: Grid, target: GridTarget | None = None):
        self.live: frozenset[int] = frozenset(grid.ranks)
        self._grid = grid
        """The grid by whose shard map workers hold their ranges: the committed one's, at first the full one."""
        self._target = target or GridTarget.of(grid)
        self._parts: dict[int, PartId] = {rank: grid.part(rank) for rank in grid.ranks}
        """The part of the model that each worker has built, lost ones included: their numbers are never used again."""
        self._hosts: dict[int, str] = {}
        self._ready: frozenset[int] = frozenset()
        """New workers that have built their parts, and enter with the next change."""
        self._released: frozenset[int] = frozenset()
        """Former spares that build another part, outside of the membership."""
        self._draining: frozenset[int] = frozenset()

    def choose_part(
        self,
        building: Mapping[int, PartId] = MappingProxyType({}),
        hosts: Mapping[int, str] = MappingProxyType({}),
        *,
        host: str = "",
    ) -> PartId | None:
        """Returns the part of the model that one more worker, on `host`, should build, or None.

        `building` are the parts that new workers build, `hosts` theirs.
        """
        grid = self._next_grid(joining=self._ready)
        hosts = {**self._hosts, **hosts}
        idle = {rank: self._parts[rank] for rank in self.live | self._ready if not grid.holds(rank)}
        candidates = [(part, hosts.get(rank, "")) for rank, part in [*idle.items(), *building.items()]]
        return choose_part(grid, target=self._target, candidates=candidates, host=host)

    def choose_moves(self, building: Mapping[int, PartId], hosts: Mapping[int, str]) -> dict[int, PartId]:
        """Returns the parts that spares should build instead of theirs (vacancies.py). `building`: the parts that new
        workers build, `hosts` theirs."""
        staying = (self.live | self._ready) - self._draining
        idle = {rank: self._parts[rank] for rank in staying if not self._grid.holds(rank)}
        if not idle:
            return {}
        hosts = {**self._hosts, **hosts}
        grid = fill(
            self._grid.without(self._draining)[0],
            target=self._target,
            candidates={**idle, **building},
            hosts=hosts,
            holders=self._grid,
        )
        left = {rank: part for rank, part in idle.items() if not grid.holds(rank)}
        return plan_moves(grid, target=self._target, idle=left, hosts=hosts)

    def stays(self, ranks: Collection[int]) -> bool:
        """Whether all of these are live and none of them leaves."""
        return self.live - self._draining >= frozenset(ranks)

    def release(self, rank: int) -> None:
        """Takes a spare out of the membership. It builds another part, and comes back as a new worker does: it holds no
        state, so the others go on without it meanwhile."""
        self.live, self._ready = self.live - {rank}, self._ready - {rank}
        self._released |= {rank}

    def _next_grid(self, leaving: Collection[int] = (), *, joining: Collection[int] = ()) -> Grid:
        """The committed grid without the dead and `leaving` ranks, its vacancies filled by the other workers."""
        grid, _ = self._grid.without({*self._dead, *leaving})
        workers = self.live.union(joining) - frozenset(leaving)
        return fill(
            grid,
            target=self._target,
            candidates={rank: self._parts[rank] for rank in workers.difference(grid.ranks)},
            hosts=self._hosts,
            holders=self._grid,
        )

    @property
    def _dead(self) -> frozenset[int]:
        return frozenset(self._grid.ranks) - self.live
