"""The modelled worker: its steps, and what it does with each frame."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parallel3d.elastic.protocol.membership import NO_GENERATION
from tests.support.protocol_tables import ModelTables
from tests.support.protocol_world import (
    ABORTED,
    CONFIRMED,
    DONE,
    GONE,
    LEFT,
    MISSING,
    RESOLVED,
    RUN,
    SPARE,
    Worker,
    World,
)  # fmt: skip


class WorkerModel(ModelTables):
    """The rules of a worker; mutants override single ones."""

    def _worker_steps(self, world: World, rank: int, worker: Worker) -> Iterator[tuple[str, Callable[[], Worker]]]:
        if worker.mode == RESOLVED and self._can_move(world, rank):
            yield "has its new ranges, confirms", lambda: self._confirm(world, rank, worker)
        if worker.mode != RUN:
            return
        iteration, phase = divmod(worker.step, 4)
        share = self.share(worker.run, rank)
        if phase <= 2 and not worker.back and self._has_reduced(world, worker, share.back_owner, iteration):
            yield f"gets the copy of {iteration}", lambda: worker._replace(back=True)
        if phase == 0:
            if not worker.own and all(self._reached(world, worker, r, 4 * iteration) for r in share.group):
                yield f"gets its reduced gradients of {iteration}", lambda: worker._replace(own=True)
            if self.has_sum(world, rank, worker, iteration):
                yield f"gets entry {iteration}", lambda: worker._replace(step=worker.step + 2)
        elif phase == 2 and worker.back:
            yield f"updates to {iteration}", lambda: self._update(rank, worker)._replace(step=worker.step + 1)
        elif phase == 3 and self._can_gather(world, rank):
            yield f"gathers {iteration}", lambda: self._gather(rank, worker)

    # The step, where it depends on others

    def _reached(self, world: World, worker: Worker, rank: int, step: int) -> bool:
        other = world.workers[rank]
        return other.run == worker.run and other.step >= step

    def _has_reduced(self, world: World, worker: Worker, rank: int, iteration: int) -> bool:
        other = world.workers[rank]
        return other.run == worker.run and (other.step > 4 * iteration or (other.step == 4 * iteration and other.own))

    def _has_contributed(self, world: World, worker: Worker, rank: int, iteration: int) -> bool:
        other = world.workers[rank]
        if other.run != worker.run:
            return False
        return other.step > 4 * iteration or (other.step == 4 * iteration and self.may_contribute(other))

    def has_sum(self, world: World, rank: int, worker: Worker, iteration: int) -> bool:
        """Whether a worker may hold the sum of the step's all-reduce: once all ranks in it have contributed."""
        ranks = self.entry_ranks(worker.run, rank)
        return all(self._has_contributed(world, worker, other, iteration) for other in ranks)

    def _can_gather(self, world: World, rank: int) -> bool:
        worker = world.workers[rank]
        group = self.share(worker.run, rank).group
        return worker.step % 4 == 3 and all(self._reached(world, worker, r, worker.step) for r in group)

    def may_contribute(self, worker: Worker) -> bool:
        """Whether a worker takes part in the all-reduce: once it holds all of its gradients."""
        return worker.own and worker.back

    def entry_ranks(self, run: int, rank: int) -> tuple[int, ...]:
        """The ranks in a rank's all-reduce: all of the grid."""
        return self.record(run).grid.ranks

    # The worker

    def _gather(self, rank: int, worker: Worker) -> Worker:
        if worker.step // 4 == self.num_iterations:
            return self.after_last(worker)
        worker = self._begin_iteration(rank, worker)
        asks = worker.draining or worker.asked == self.record(worker.run).generation
        return self._ask_for_change(worker, worker.run) if asks else worker

    def after_last(self, worker: Worker) -> Worker:
        """Waits for the end of the run."""
        return worker._replace(mode=DONE, outbox=(*worker.outbox, ("finish", self.record(worker.run).generation)))

    def _begin_iteration(self, rank: int, worker: Worker) -> Worker:
        share = self.share(worker.run, rank)
        for element in share.elements:
            self._check(worker.held[element] == worker.position, f"rank {rank} begins with versions {worker.held}")
        return worker._replace(step=worker.step + 1, own=False, back=not share.back)

    def _ask_for_change(self, worker: Worker, record: int) -> Worker:
        return worker._replace(mode=LEFT, outbox=(*worker.outbox, ("suspect", self.record(record).generation)))

    def _update(self, rank: int, worker: Worker) -> Worker:
        """One update by the gradients of the worker's position."""
        self._check(worker.has_gradients(worker.position), f"rank {rank} lacks gradients of {worker.position}")
        held = tuple(version if version == MISSING else version + 1 for version in worker.held)
        for version in held:
            self._check(version in (MISSING, worker.position), f"rank {rank} updates to {held} by {worker.position}")
        return worker._replace(held=held)

    def _take_abort(self, world: World, rank: int) -> World:
        """Takes the newest abort: handles a commit before it, reports."""
        worker = world.workers[rank]
        generation = max(frame[1] for frame in worker.inbox if frame[0] == "abort_generation")
        for frame in worker.inbox:
            if frame[0] == "commit":
                worker = self._enter(rank, worker)
                if not worker.alive:
                    return self._put(world, rank, worker)
            elif frame[0] in ("drain_request", "stay"):
                worker = worker._replace(draining=frame[0] == "drain_request")
        worker = worker._replace(generation=generation, inbox=(), outbox=(*worker.outbox, ("report", generation)))
        return self._put(world, rank, self.leave_step(worker))

    def leave_step(self, worker: Worker) -> Worker:
        """Drops what is not agreed; none of it moves any more."""
        worker = worker._replace(mode=ABORTED, proposed=NO_GENERATION, new=())
        if not self.reduced:
            return worker
        ready = worker.own and worker.back
        return worker._replace(own=ready, back=ready)

    def _take(self, world: World, rank: int) -> World:
        """Handles the first frame in its inbox."""
        worker = world.workers[rank]
        (kind, *rest), inbox = worker.inbox[0], worker.inbox[1:]
        worker = worker._replace(inbox=inbox)
        match kind:
            case "record":
                worker = self._take_record(rank, worker, *rest)
            case "fetch_entries":
                entries = ("entries", rest[0], max(worker.position, 0))
                worker = worker._replace(outbox=(*worker.outbox, entries))
            case "commit":
                worker = self._enter(rank, worker)
            case "change_request":
                worker = worker._replace(asked=rest[0])
            case "drain_request" | "stay":
                worker = worker._replace(draining=kind == "drain_request")
            case "build_part":
                worker = self.rebuild(worker, rest[0])
        return self._put(world, rank, worker)

    def rebuild(self, worker: Worker, part: tuple[int, int]) -> Worker:
        """A spare builds another part, as if it were new."""
        return Worker(
            mode=SPARE,
            part=part,
            held=(MISSING,) * self.num_elements,
            generation=worker.generation,
            shard_map=worker.shard_map,
            has_moved=True,
            inbox=worker.inbox,
            outbox=(*worker.outbox, ("ready", worker.generation, part)),
        )

    def _take_record(self, rank: int, worker: Worker, number: int, base: int, has_entries: bool) -> Worker:
        """Reads the difference from the base, or asks for the whole record if this worker lacks the base."""
        record = self.record(number)
        if record.generation < worker.generation:
            return worker  # a newer abort has arrived
        if self.lacks_base(worker, base):
            request = ("request_record", record.generation)
            return worker._replace(outbox=(*worker.outbox, request))
        self._check(base in (NO_GENERATION, worker.shard_map), f"rank {rank} reads the difference from another record")
        return self._resolve(rank, worker, number, has_entries)

    def lacks_base(self, worker: Worker, base: int) -> bool:
        """Bases are compared by their generations."""
        return base != NO_GENERATION and (
            worker.shard_map == NO_GENERATION
            or self.record(base).generation != self.record(worker.shard_map).generation
        )

    def _resolve(self, rank: int, worker: Worker, number: int, has_entries: bool) -> Worker:
        """Brings its ranges to the record's position."""
        record = self.record(number)
        newest = record.position.iteration
        if record.previous is not None and record.previous.holds(rank):
            self._check(worker.position <= newest, f"rank {rank} at {worker.position} would go back to {newest}")
            self._check(worker.position >= newest - 1, f"rank {rank} at {worker.position} can't follow to {newest}")
            if worker.position < newest:
                self._check(has_entries, f"rank {rank} lacks the entries up to {newest}")
                worker = worker._replace(step=4 * newest + 2)
            if self.needs_update(worker):
                worker = self._update(rank, worker)
            worker = worker._replace(step=4 * newest + 3)
        return worker._replace(mode=RESOLVED, proposed=number, run=NO_GENERATION)

    def needs_update(self, worker: Worker) -> bool:
        """A range at the record's version is left alone."""
        return any(version not in (MISSING, worker.position) for version in worker.held)

    def _can_move(self, world: World, rank: int) -> bool:
        proposed = world.workers[rank].proposed
        sources = {source for source, _ in self.sources(proposed, rank)}
        if rank in self.record(proposed).joiners:
            sources.add(self.record(proposed).state_source)
        return all(
            world.workers[source].proposed == proposed and world.workers[source].mode in (RESOLVED, CONFIRMED)
            for source in sources
        )

    def _confirm(self, world: World, rank: int, worker: Worker) -> Worker:
        record = self.record(worker.proposed)
        versions = [MISSING] * self.num_elements
        if record.grid.holds(rank) and record.previous is None:
            for element in self.share(worker.proposed, rank).elements:
                versions[element] = 0  # made from the seed
        for source, element in self.sources(worker.proposed, rank):
            versions[element] = world.workers[source].held[element]
            self._check(
                versions[element] == record.position.iteration,
                f"rank {rank} gets version {versions[element]} of element {element} from rank {source}",
            )
        if rank in record.joiners:
            worker = self.take_state(worker, world.workers[record.state_source])
        confirm = ("confirm", record.generation)
        return self.after_confirm(
            worker._replace(mode=CONFIRMED, new=tuple(versions), outbox=(*worker.outbox, confirm))
        )

    def take_state(self, worker: Worker, source: Worker) -> Worker:
        """A joiner takes over the train state."""
        return worker._replace(step=source.step)

    def after_confirm(self, worker: Worker) -> Worker:
        """The old ranges are kept."""
        return worker

    def _enter(self, rank: int, worker: Worker) -> Worker:
        """Takes the commit: the new ranges count, the old ones are freed."""
        self._check(worker.mode == CONFIRMED, f"rank {rank} gets a commit while it is {worker.mode}")
        record = self.record(worker.proposed)
        worker = worker._replace(
            shard_map=worker.proposed,
            run=worker.proposed,
            held=worker.new,
            proposed=NO_GENERATION,
            new=(),
            own=False,
            back=False,
            has_moved=False,
        )
        if rank in record.draining:
            return worker._replace(mode=GONE, run=NO_GENERATION, inbox=(), outbox=())
        if not record.grid.holds(rank):
            return worker._replace(mode=SPARE, run=NO_GENERATION)
        return self._gather(rank, worker._replace(mode=RUN))
