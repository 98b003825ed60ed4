"""The membership protocol's model with a coordinator that may be lost, and a successor that takes over.

Connections break with it: what was on its way to the workers is gone; what was on its way to the coordinator is gone,
or reaches the successor. That one goes on from the newest committed record of any live worker, as FailoverCoordinator
does, sends its commit to those that lack it, and begins a change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
        if world.takeovers:
            yield "the coordinator is lost", lambda: self._take_over(world, keeps_frames=False)
            if any(worker.outbox for worker in world.workers):
                yield "the coordinator is lost, frames wait", lambda: self._take_over(world, keeps_frames=True)

    def _take_over(self, world: World, *, keeps_frames: bool) -> World:
        live = {rank: worker for rank, worker in enumerate(world.workers) if worker.alive}
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
        for rank, worker in live.items():
            outbox = worker.outbox if keeps_frames else ()
            world = self._put(world, rank, worker._replace(inbox=(), outbox=outbox, draining=False))
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
        protocol = self.protocol(world)
        lost = tuple(rank for rank in sorted(protocol.live) if not world.workers[rank].alive)
        world = self._submit(world, ("lost_together", lost) if lost else ("begin",))
        for rank in () if world.ended else self.leaving(live):
            world = self._submit(world, ("announce_drain", rank))
        self._check(bool(world.ended) == bool(self.what_is_lost(world)), "goes on or halts wrongly after a takeover")
        return world

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
