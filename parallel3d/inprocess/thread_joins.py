"""Workers that join a run of threads, each at a step of its own, and spares that move: the others wait for them before
they begin a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from parallel3d.errors import RunEnded
from parallel3d.inprocess.thread_coordinator import ThreadCoordinator
from parallel3d.inprocess.world import ThreadWorld
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import PartId
from parallel3d.trainer.context import RankContext
from parallel3d.worker.fault_injection import FaultInjector


@dataclass(frozen=True, kw_only=True)
class Joins:
    """`prepare(rank, injector, part)` builds a new worker for each of `steps`, and spares that move."""

    steps: Sequence[int] = ()
    moves: bool = False
    """Spares may build other parts than theirs."""
    surplus: Mapping[int, PartId] = field(default_factory=dict)
    """What some new workers build by rank, although no replica lacks it: they are spares until one does."""
    prepare: Callable[[int, FaultInjector, PartId], RankContext] | None = None


NO_JOINS = Joins()


class ThreadJoins:
    """New worker number i, whose rank is `first_rank` + i, joins in `joins.steps[i]`."""

    def __init__(self, world: ThreadWorld, coordinator: ThreadCoordinator, joins: Joins, *, first_rank: int):
        self._world = world
        self._coordinator = coordinator
        self._joins = joins
        self._steps = {first_rank + index: step for index, step in enumerate(joins.steps)}
        self._called: set[int] = set()
        self._arrived: set[int] = set()
        """Admitted, or dead before."""
        self._moving: set[int] = set()
        if joins.moves:
            coordinator.on_settled = self._move_spares

    def begin_step(self, rank: int, injector: FaultInjector, step: int) -> None:
        """Waits, on a rank of the grid, for the workers that join in this step."""
        injector.begin_step(step)
        due = {joiner for joiner, at in self._steps.items() if at <= step}
        if due <= self._arrived and not self._moving:
            return
        self._world.run_locked(lambda: self._called.update(due))
        self._world.wait(
            rank,
            lambda: due <= self._arrived and not self._moving,
            lambda: f"for ranks {sorted(due | self._moving)} to join",
        )

    def build(self, rank: int, injector: FaultInjector) -> RankContext:
        """Returns a new worker that has been admitted with the part that is missing then; raises RunEnded if the run
        ends before its turn."""
        assert self._joins.prepare is not None
        self._world.wait(rank, lambda: self._is_over or self._can_build(rank), lambda: "to join", token=AbortToken())
        if self._is_over:
            raise RunEnded("the run has ended before")
        return self.build_part(rank, injector, self._world.run_locked(lambda: self._choose(rank)))

    def build_part(self, rank: int, injector: FaultInjector, part: PartId) -> RankContext:
        """Returns a worker that has built `part` and been admitted with it."""
        assert self._joins.prepare is not None
        try:
            context = self._joins.prepare(rank, injector, part)
            injector("build")
            self._coordinator.memberships[rank].announce_ready()
        finally:
            self._world.run_locked(lambda: self._on_arrival(rank))
        return context

    def _move_spares(self) -> None:
        while moves := self._coordinator.protocol.choose_moves(self._coordinator.building, {}):
            self._moving.update(moves)
            for rank, part in moves.items():
                self._coordinator.move(rank, part)

    def _on_arrival(self, rank: int) -> None:
        self._coordinator.building.pop(rank, None)
        self._arrived.add(rank)
        self._moving.discard(rank)

    @property
    def _is_over(self) -> bool:
        return self._coordinator.protocol.over

    def _can_build(self, rank: int) -> bool:
        return rank in self._called and (rank in self._joins.surplus or self._missing() is not None)

    def _missing(self) -> PartId | None:
        return self._coordinator.protocol.choose_part(self._coordinator.building)

    def _choose(self, rank: int) -> PartId:
        part = self._joins.surplus.get(rank) or self._missing()
        assert part is not None
        self._coordinator.building[rank] = part
        return part
