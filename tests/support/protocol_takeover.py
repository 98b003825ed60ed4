"""The membership protocol's model with a coordinator that may be lost, and a successor that takes over.

Connections break with it: what was on its way to the workers is gone; what was on its way to the coordinator is gone,
or reaches the successor. That one goes on from the newest committed record of any live worker, as FailoverCoordinator
does, sends its commit to those that lack it, and begins a change.

A worker that the lost coordinator had taken for dead may run on, if its guardian was out of reach (one that can be
reached kills it first: coordinator/fences.py). That guardian looks for a coordinator, too, and its worker has left its
generation as the others have. Either both come too late for the quorum check, and the successor counts the worker as
lost (what is live and not guarded: FailoverCoordinator._resume). Or the successor learns of it as of any other one, and
not that it was taken for dead: only records say who is a member. So it is a member again if the change that was to
evict it was not committed, and then it still holds its ranges and reports its position. If that change was committed,
the successor does not listen to it (mark_gone), or, if it once came as a new worker, admits it as a new one again
(_readmit): its ranges of before count for nothing (optim/reshard.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import combinations

from parallel3d.config.schema import TimeoutConfig
from parallel3d.elastic.coordinator.failover_coordinator import ResumedProtocol
from parallel3d.elastic.protocol.membership import NO_GENERATION, GenerationRecord
from parallel3d.elastic.settings import ElasticSettings
from tests.support.protocol_moves import MovesModel
from tests.support.protocol_world import Frame, Step, Worker, World

_TIMEOUT = TimeoutConfig(multiplier=1.0, min_s=1.0, max_s=1.0)


class TakeoverModel(MovesModel):
    """With `reduced`, commits are taken one by one as long as the coordinator may be lost: its successor goes on from
    those that have been. Whether a frame reaches the coordinator before it is lost makes no difference: what it sends
    in answer is lost with it, and a successor ignores frames of an earlier generation."""

    def is_taken_at_once(self, world: World, frame: Frame) -> bool:
        return super().is_taken_at_once(world, frame) and not (world.takeovers and frame[0] == "commit")

    def _faults(self, world: World) -> Iterator[Step]:
        yield from super()._faults(world)
        taken_for_dead = [rank for rank, worker in enumerate(world.workers) if worker.alive and worker.evicted]
        for count in range(len(taken_for_dead) + 1) if world.takeovers else ():
            for late in combinations(taken_for_dead, count):
                yield from self._losses(world, late)

    def _losses(self, world: World, late: tuple[int, ...]) -> Iterator[Step]:
        how = f", too late for {late}" if late else ""
        for keeps_frames in (False, True) if any(worker.outbox for worker in world.workers) else (False,):
            label = f"the coordinator is lost{how}{', frames wait' if keeps_frames else ''}"
            yield label, partial(self._take_over, world, keeps_frames=keeps_frames, late=late)

    def _take_over(self, world: World, *, keeps_frames: bool, late: tuple[int, ...] = ()) -> World:
        """`late`: workers taken for dead that the successor does not hear of."""
        live = {rank: worker for rank, worker in enumerate(world.workers) if worker.alive and rank not in late}
        base = self.base_of({rank: worker.shard_map for rank, worker in live.items()})
        if base == NO_GENERATION:
            return world._replace(ended="halted")  # nobody has begun to train
        record = self.record(base)
        elastic = ElasticSettings(
            grid=self.grid,
            zero_stage=self.zero_stage,
            zero_backups=self.zero_backups,
            target=self.target,
            heartbeat_timeout=_TIMEOUT,
            watchdog_timeout=_TIMEOUT,
        )
        newest = self.newest_of([worker.generation for worker in live.values()], record.generation)
        protocol = ResumedProtocol(elastic, record, newest_generation=newest)
        live = {rank: worker._replace(evicted=self.stays_out(record, rank, worker)) for rank, worker in live.items()}
        for rank, worker in live.items():
            outbox = worker.outbox if keeps_frames else ()
            world = self._put(world, rank, worker._replace(inbox=(), outbox=outbox, draining=False))
        for rank in late:
            world = self._put(world, rank, world.workers[rank]._replace(inbox=(), outbox=()))
        for rank in world.unseen:
            world = self.bury(world, rank)
        world = world._replace(protocol=self._intern(protocol), takeovers=world.takeovers - 1)
        behind = tuple(rank for rank in live if rank in record.members and live[rank].shard_map != base)
        world = self.send_commit(world, behind, record.generation)
        for rank, worker in live.items():
            if self.has_left(protocol, rank, worker):
                world = self._submit(world, ("release", rank))
            is_member = rank in self.protocol(world).live or self.is_about_to_leave(record, rank)
            if not is_member and not worker.evicted:
                world = self._submit(world, ("release", rank))
                world = self._submit(world, ("admit", rank, worker.part))
        lost = self.lost_members(world, self.protocol(world).live)
        world = self._submit(world, ("lost_together", lost) if lost else ("begin",))
        for rank in () if world.ended else self.leaving(live):
            world = self._submit(world, ("announce_drain", rank))
        self._check(bool(world.ended) == bool(self.what_is_lost(world)), "goes on or halts wrongly after a takeover")
        return world

    def stays_out(self, record: GenerationRecord, rank: int, worker: Worker) -> bool:
        """Whether the successor does not listen to this worker: the committed record is without it, and it has never
        been asked for a part of the model, as new workers are."""
        was_asked = not self.grid.holds(rank) or worker.part != self.grid.part(rank)
        return worker.evicted and rank not in record.members and not was_asked

    def lost_members(self, world: World, live: frozenset[int]) -> tuple[int, ...]:
        """The members that the successor does not hear of."""
        return tuple(r for r in sorted(live) if not world.workers[r].alive or world.workers[r].evicted)

    def has_left(self, protocol: ResumedProtocol, rank: int, worker: Worker) -> bool:
        """Whether a spare has left its generation to build another part."""
        return protocol.has_left(rank, worker.part)

    def is_about_to_leave(self, record: GenerationRecord, rank: int) -> bool:
        """Those that the committed record lets go only wait for its commit."""
        return rank in record.draining

    def leaving(self, live: Mapping[int, Worker]) -> list[int]:
        """Those that were granted to leave: they ask the successor again."""
        return [rank for rank, worker in live.items() if worker.draining and not worker.evicted]

    def base_of(self, shard_maps: dict[int, int]) -> int:
        """The newest record of all."""
        held = [number for number in shard_maps.values() if number != NO_GENERATION]
        return max(held, key=lambda number: self.record(number).generation, default=NO_GENERATION)

    def newest_of(self, generations: list[int], committed: int) -> int:
        """The highest number that any worker has received."""
        return max([*generations, committed])

    def send_commit(self, world: World, behind: tuple[int, ...], generation: int) -> World:
        return self._send(world, behind, ("commit", generation))
