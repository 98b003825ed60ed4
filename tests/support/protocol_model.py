"""An explicit-state model checker for the membership protocol: the real Protocol, modelled workers and network.

A world is one immutable value: the protocol's state, the workers with what they hold, the frames under way. `moves`
yields every world that can come next; `explore` visits all that can be reached, `walk` follows one way at random. What
must never be raises Violation, with the way that led there.

A worker in iteration i, on the ranges that it owns (own) and those that it backs up (back)::

    step 4i      own: its range's reduced gradient is there        needs all of its stage in iteration i
                 back: so is that of the range it backs up         needs its owner's
    step 4i + 2  holds entry i                                     needs own and back of every rank of the grid
    step 4i + 3  has updated both ranges: their version is i
    step 4i + 4  has gathered the weights: next iteration          needs all of its stage at 4i + 3

It runs until it takes a seal; then reports, takes the record (brings its ranges to the record's position: resolves),
gets its new ranges and confirms, and with the go frees the old ones and runs again. It may die between any two moves.
A sum or a copy that was under way when a worker died may still arrive: collectives ask only how far a worker has come.

Reduction. With `reduced`, moves that commute with all others and that nobody else can see are made at once:

- Frames to the coordinator are delivered at once, a death is noticed at once. A report or confirmation under way when
  its change is begun anew is ignored: the same as if it had not been sent. A death seen late is one that came late.
- Once a change has begun nobody runs on. A running worker depends only on how far the others have come, never on
  what they have been told, so everything that it does after the begin it could have done before.
- Seals are taken in the order of ranks (a report says the same whenever it is sent), go and gather at once.
- A aborted worker only remembers whether it had all of its gradients.

Deaths stay possible before, between and after all other moves. Larger worlds are walked at random without `reduced`;
on small ones both ways are explored and compared.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from math import lcm
from typing import Any, NamedTuple

from parallel3d.elastic.protocol.membership import NO_GENERATION, GenerationRecord, LogPosition, LostWorker, StateReport
from parallel3d.elastic.protocol.state_machine import (
    AbortGeneration,
    Action,
    Commit,
    DrainRefused,
    DrainRequest,
    FinishRun,
    MembershipProtocol,
    Propose,
    StopRun,
)
from parallel3d.errors import ProtocolError
from parallel3d.optim.shard_map import ShardMap, plan_moves, plan_shard_map
from parallel3d.parallel.grid import Grid

RUN, LEFT, ABORTED, RESOLVED, CONFIRMED, SPARE, DONE, GONE, DEAD = (
    "run", "left", "aborted", "resolved", "confirmed", "spare", "done", "gone", "dead",
)  # fmt: skip

Frame = tuple[Any, ...]
MISSING = -1
"""The version of an element that a worker does not hold."""


class Violation(Exception):
    """Something that must never be; the message ends with the way there."""


class Worker(NamedTuple):
    """One worker's state; DEAD and GONE ones stay, since what they have sent may still arrive."""

    mode: str = LEFT
    generation: int = NO_GENERATION
    """The newest generation of which it has heard."""
    shard_map: int = NO_GENERATION
    """The committed record (its index) by whose cut it holds `held`."""
    run: int = NO_GENERATION
    """The record in whose generation `step`, `own` and `back` count."""
    step: int = 3
    own: bool = False
    back: bool = False
    held: tuple[int, ...] = ()
    """Version of each element of its stage."""
    proposed: int = NO_GENERATION
    """The record that it is about to enter."""
    new: tuple[int, ...] = ()
    """Its ranges by that record's cut."""
    draining: bool = False
    inbox: tuple[Frame, ...] = ()
    outbox: tuple[Frame, ...] = ()

    @property
    def position(self) -> int:
        """The newest entry that it holds."""
        return self.step // 4 if self.step % 4 >= 2 else self.step // 4 - 1

    @property
    def alive(self) -> bool:
        return self.mode not in (DEAD, GONE)

    @property
    def has_abort(self) -> bool:
        return any(frame[0] == "abort_generation" for frame in self.inbox)

    def has_gradients(self, iteration: int) -> bool:
        return self.step // 4 == iteration and self.own and self.back


class World(NamedTuple):
    """Everything."""

    protocol: int
    workers: tuple[Worker, ...]
    deaths: int
    """So many more may happen."""
    suspicions: int
    drains: int
    unseen: tuple[int, ...] = ()
    """Dead, and the coordinator does not know yet."""
    ended: str = ""


Step = tuple[str, Callable[[], World]]


class Share(NamedTuple):
    """What a rank has to do with the cut of its stage in one generation."""

    group: tuple[int, ...]
    own: tuple[int, ...]
    back: tuple[int, ...]
    back_owner: int

    @property
    def elements(self) -> tuple[int, ...]:
        return self.own + self.back


class Model:
    """The rules of one world; mutants override single ones."""

    def __init__(
        self,
        grid: Grid,
        *,
        num_iterations: int,
        zero_stage: int = 1,
        zero_backups: int = 1,
        hosts: Mapping[int, str] | None = None,
        protocol: type[MembershipProtocol] = MembershipProtocol,
        reduced: bool = True,
    ):
        self.grid = grid
        self.num_iterations = num_iterations
        self.zero_stage = zero_stage
        self.zero_backups = zero_backups
        self.hosts = dict.fromkeys(grid.ranks, "") if hosts is None else hosts
        self.reduced = reduced
        self.num_elements = lcm(*(len(stage) for stage in grid.stages), *range(1, max(map(len, grid.stages)) + 1))
        self._first = protocol(grid, zero_stage=zero_stage, zero_backups=zero_backups)
        self._protocols: list[MembershipProtocol] = []
        self._protocol_ids: dict[Any, int] = {}
        self._answers: dict[tuple[int, Frame], tuple[int, list[Action]]] = {}
        self._records: list[GenerationRecord] = []
        self._frozen: dict[int, tuple[Any, Any]] = {}
        self._record_ids: dict[Any, int] = {}
        self.share = cache(self._share)
        self.sources = cache(self._sources)

    def start(self, *, deaths: int, suspicions: int = 0, drains: int = 0) -> World:
        """Nobody has reported to generation 0 yet."""
        workers = tuple(Worker(inbox=(("abort_generation", 0),)) for _ in self.grid.ranks)
        return World(self._intern(self._first), workers, deaths, suspicions, drains)

    @property
    def records(self) -> list[GenerationRecord]:
        """Every record that was opened."""
        return self._records

    @property
    def reports(self) -> set[Frame]:
        """Every report that the protocol has heard."""
        return {event for _, event in self._answers if event[0] == "report"}

    def protocol(self, world: World) -> MembershipProtocol:
        return self._protocols[world.protocol]

    def record(self, number: int) -> GenerationRecord:
        return self._records[number]

    # What can happen next

    def moves(self, world: World) -> list[Step]:
        """Every move, or with `reduced` enough of them; empty only where the world has ended."""
        if world.ended:
            return []
        if self.reduced and (eager := next(self._eager_moves(world), None)):
            return [eager]
        moves = [*self._frames(world), *self._steps(world)]
        if not moves:
            raise Violation(f"stuck: {self.describe(world)}")
        return [*moves, *self._faults(world)]

    def _eager_moves(self, world: World) -> Iterator[Step]:
        for rank, worker in enumerate(world.workers):
            if worker.outbox:
                yield f"{worker.outbox[0]} of rank {rank} arrives", lambda r=rank: self._deliver(world, r)
        for rank, worker in enumerate(world.workers):
            if worker.inbox and worker.inbox[0][0] != "record" and not worker.has_abort:
                yield f"rank {rank} takes {worker.inbox[0]}", lambda r=rank: self._take(world, r)
            if worker.mode == RUN and not worker.has_abort and self._can_gather(world, rank):
                yield f"rank {rank} gathers", lambda r=rank: self._put(world, r, self._gather(r, world.workers[r]))
            if worker.has_abort:
                return

    def _frames(self, world: World) -> Iterator[Step]:
        """Frames that arrive. A seal is heard at once, even when the frames before it have not been acted upon."""
        aborted = False
        for rank, worker in enumerate(world.workers):
            if worker.outbox:
                yield f"{worker.outbox[0]} of rank {rank} arrives", lambda r=rank: self._deliver(world, r)
            if not worker.alive:
                continue
            if worker.has_abort and not (self.reduced and aborted):
                aborted = True
                yield f"rank {rank} takes its seal", lambda r=rank: self._take_abort(world, r)
            if worker.inbox and worker.inbox[0][0] != "abort_generation" and not (self.reduced and worker.has_abort):
                yield f"rank {rank} takes {worker.inbox[0]}", lambda r=rank: self._take(world, r)
        for rank in world.unseen:
            yield f"rank {rank} is found dead", lambda r=rank: self._notice(world, r)

    def _steps(self, world: World) -> Iterator[Step]:
        """What workers do of their own."""
        for rank, worker in enumerate(world.workers):
            if self.reduced and worker.has_abort:
                continue
            for label, make in self._worker_steps(world, rank, worker):
                yield f"rank {rank} {label}", lambda r=rank, m=make: self._put(world, r, m())

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
            if all(self._has_contributed(world, worker, r, iteration) for r in self.entry_ranks(worker.run, rank)):
                yield f"gets entry {iteration}", lambda: worker._replace(step=worker.step + 2)
        elif phase == 2 and worker.back:
            yield f"updates to {iteration}", lambda: self._update(rank, worker)._replace(step=worker.step + 1)
        elif phase == 3 and self._can_gather(world, rank):
            yield f"gathers {iteration}", lambda: self._gather(rank, worker)

    def _faults(self, world: World) -> Iterator[Step]:
        for rank, worker in enumerate(world.workers):
            if worker.alive and world.deaths:
                yield f"rank {rank} dies", lambda r=rank: self._kill(world, r)
            if worker.mode in (RUN, RESOLVED, DONE) and world.suspicions:
                yield f"rank {rank} suspects", lambda r=rank: self._suspect(world, r)
            if worker.alive and world.drains:
                yield (
                    f"rank {rank} is asked to leave",
                    lambda r=rank: self._submit(world._replace(drains=world.drains - 1), ("announce_drain", r)),
                )

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

    def _can_gather(self, world: World, rank: int) -> bool:
        worker = world.workers[rank]
        group = self.share(worker.run, rank).group
        return worker.step % 4 == 3 and all(self._reached(world, worker, r, worker.step) for r in group)

    def may_contribute(self, worker: Worker) -> bool:
        """Whether a worker takes part in the all-reduce: with all of its gradients in its hands."""
        return worker.own and worker.back

    def entry_ranks(self, run: int, rank: int) -> tuple[int, ...]:
        """Who takes part in a rank's all-reduce: everybody."""
        return self.record(run).grid.ranks

    # The worker

    def _gather(self, rank: int, worker: Worker) -> Worker:
        if worker.step // 4 == self.num_iterations:
            return self.after_last(worker)
        worker = self._begin_iteration(rank, worker)
        return self._ask_for_change(worker, worker.run) if worker.draining else worker

    def after_last(self, worker: Worker) -> Worker:
        """It waits for its release."""
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
        """Hears the newest seal: takes note of the go before it, reports."""
        worker = world.workers[rank]
        generation = max(frame[1] for frame in worker.inbox if frame[0] == "abort_generation")
        for frame in worker.inbox:
            if frame[0] == "commit":
                worker = self._enter(rank, worker)
            elif frame[0] in ("drain_request", "stay"):
                worker = worker._replace(draining=frame[0] == "drain_request")
        worker = worker._replace(generation=generation, inbox=(), outbox=(*worker.outbox, ("report", generation)))
        return self._put(world, rank, self.leave_step(worker))

    def leave_step(self, worker: Worker) -> Worker:
        """Drops what is not agreed: nothing of it moves any more."""
        worker = worker._replace(mode=ABORTED, proposed=NO_GENERATION, new=())
        if not self.reduced:
            return worker
        ready = worker.own and worker.back
        return worker._replace(own=ready, back=ready)

    def _take(self, world: World, rank: int) -> World:
        """Acts upon the first frame in its inbox."""
        worker = world.workers[rank]
        (kind, *rest), inbox = worker.inbox[0], worker.inbox[1:]
        worker = worker._replace(inbox=inbox)
        match kind:
            case "record":
                worker = self._resolve(rank, worker, rest[0])
            case "commit":
                worker = self._enter(rank, worker)
            case "drain_request" | "stay":
                worker = worker._replace(draining=kind == "drain_request")
        return self._put(world, rank, worker)

    def _resolve(self, rank: int, worker: Worker, number: int) -> Worker:
        """Brings its ranges to the record's position."""
        record = self.record(number)
        newest = record.position.iteration
        if record.generation < worker.generation:
            return worker  # a newer seal has been heard
        if record.previous is not None and record.previous.holds(rank):
            self._check(worker.position <= newest, f"rank {rank} at {worker.position} would go back to {newest}")
            self._check(worker.position >= newest - 1, f"rank {rank} at {worker.position} can't follow to {newest}")
            worker = worker._replace(step=4 * newest + 2) if worker.position < newest else worker
            if self.needs_update(worker):
                worker = self._update(rank, worker)
        return worker._replace(mode=RESOLVED, proposed=number, run=NO_GENERATION, step=4 * newest + 3)

    def needs_update(self, worker: Worker) -> bool:
        """A range at the record's version is left alone."""
        return any(version not in (MISSING, worker.position) for version in worker.held)

    def _can_move(self, world: World, rank: int) -> bool:
        proposed = world.workers[rank].proposed
        sources = {source for source, _ in self.sources(proposed, rank)}
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
        confirm = ("confirm", record.generation)
        return self.after_confirm(
            worker._replace(mode=CONFIRMED, new=tuple(versions), outbox=(*worker.outbox, confirm))
        )

    def after_confirm(self, worker: Worker) -> Worker:
        """The old ranges are kept."""
        return worker

    def _enter(self, rank: int, worker: Worker) -> Worker:
        """The go: the new ranges count, the old ones are freed."""
        self._check(worker.mode == CONFIRMED, f"rank {rank} is told to go, it is {worker.mode}")
        record = self.record(worker.proposed)
        worker = worker._replace(
            shard_map=worker.proposed,
            run=worker.proposed,
            held=worker.new,
            proposed=NO_GENERATION,
            new=(),
            own=False,
            back=False,
        )
        if rank in record.draining:
            return worker._replace(mode=GONE, run=NO_GENERATION, inbox=(), outbox=())
        if not record.grid.holds(rank):
            return worker._replace(mode=SPARE, run=NO_GENERATION)
        return self._gather(rank, worker._replace(mode=RUN))

    # Faults

    def _kill(self, world: World, rank: int) -> World:
        world = self._put(world, rank, world.workers[rank]._replace(mode=DEAD, inbox=()))
        world = world._replace(deaths=world.deaths - 1, unseen=tuple(sorted((*world.unseen, rank))))
        return self._notice(world, rank) if self.reduced else world

    def _notice(self, world: World, rank: int) -> World:
        worker = world.workers[rank]
        sent = {} if self.reduced else {name: getattr(worker, name) for name in ("run", "step", "own", "back")}
        world = self._put(world, rank, Worker(mode=DEAD, **sent))
        world = world._replace(unseen=tuple(r for r in world.unseen if r != rank))
        before = self.protocol(world)
        if before.over or rank not in before.live:
            return world
        world = self._submit(world, ("on_lost", rank))
        lost = self.what_is_lost(world)
        if world.ended:
            self._check(lost != "", "halted although nothing is lost")
        else:
            self._check(lost == "", f"goes on without {lost}")
        return world

    def _suspect(self, world: World, rank: int) -> World:
        worker = world.workers[rank]
        record = worker.proposed if worker.mode == RESOLVED else worker.run
        world = world._replace(suspicions=world.suspicions - 1)
        return self._put(world, rank, self._ask_for_change(worker, record))

    # The coordinator

    def _deliver(self, world: World, rank: int) -> World:
        worker = world.workers[rank]
        (kind, generation), outbox = worker.outbox[0], worker.outbox[1:]
        world = self._put(world, rank, worker._replace(outbox=outbox))
        if kind != "report":
            return self._submit(world, (kind, rank, generation))
        state_generation = (
            NO_GENERATION if worker.shard_map == NO_GENERATION else self.record(worker.shard_map).generation
        )
        version = min((v for v in worker.held if v != MISSING), default=0)
        return self._submit(world, (kind, rank, generation, state_generation, max(worker.position, 0), version))

    def _submit(self, world: World, event: Frame) -> World:
        """Feeds the protocol and carries out what it says."""
        key = (world.protocol, event)
        if key not in self._answers:
            protocol = copy.copy(self.protocol(world))
            try:
                actions = self._feed(protocol, event)
            except ProtocolError as error:
                raise Violation(f"{event}: {error}") from error
            self._answers[key] = self._intern(protocol), actions
        number, actions = self._answers[key]
        world = world._replace(protocol=number)
        for action in actions:
            world = self._carry_out(world, action, event)
        return world

    def _feed(self, protocol: MembershipProtocol, event: Frame) -> list[Action]:
        match event:
            case ("report", rank, generation, state_generation, position, version):
                return protocol.report(
                    StateReport(
                        rank=rank,
                        generation=generation,
                        state_generation=state_generation,
                        position=LogPosition(iteration=position),
                        entries=({"iteration": position},),
                        version=version,
                        host=self.hosts[rank],
                    )
                )
            case ("confirm", rank, generation):
                return protocol.confirm(rank, generation, "the same plan")
            case ("on_lost", rank):
                return protocol.on_lost([LostWorker(rank=rank, why="killed")])
            case ("suspect", rank, generation):
                return protocol.suspect(rank, generation, "a peer is gone")
            case ("announce_drain", rank):
                return protocol.announce_drain(rank)
            case ("finish", rank, generation):
                return protocol.finish(rank, generation)
        raise AssertionError(event)

    def _carry_out(self, world: World, action: Action, event: Frame) -> World:
        match action:
            case AbortGeneration(ranks=ranks, generation=generation):
                return self._send(world, ranks, ("abort_generation", generation))
            case Propose(record=record):
                return self._send(world, record.members, ("record", self._intern_record(record)))
            case Commit(generation=generation, members=members):
                return self._send(world, members, ("commit", generation))
            case DrainRequest(rank=rank):
                return self._send(world, (rank,), ("drain_request",))
            case DrainRefused(rank=rank):
                return self._send(world, (rank,), ("stay",))
            case FinishRun(ranks=ranks):
                self._check_end(world, ranks)
                return world._replace(ended="released")
            case StopRun(reason=reason):
                self._check(event[0] == "on_lost", f"halted by {event}: {reason}")
                return world._replace(ended="halted")
        raise AssertionError(action)

    def _send(self, world: World, ranks: tuple[int, ...], frame: Frame) -> World:
        workers = list(world.workers)
        for rank in ranks:
            if workers[rank].alive:
                workers[rank] = workers[rank]._replace(inbox=(*workers[rank].inbox, frame))
        return world._replace(workers=tuple(workers))

    # What must be

    def what_is_lost(self, world: World) -> str:
        """What a run can't do without and nobody has; found in what the workers really hold."""
        record = self.protocol(world).committed
        grid = self.grid if record is None else record.grid
        known = [worker.alive or rank in world.unseen for rank, worker in enumerate(world.workers)]
        for stage, replicas in enumerate(grid.stages):
            if not any(all(known[rank] for rank in ranks) for ranks in replicas.values()):
                return f"stage {stage}"
        if record is None:
            return ""
        number = self._intern_record(record)
        for stage in range(grid.pp_size):
            for tp in range(grid.tp_size):
                held = [self._holdings(world.workers[r], number) for r in grid.dp_ranks(stage, tp)]
                for element in range(self.num_elements):
                    if all(not versions or versions[element] == MISSING for versions in held):
                        return f"element {element} of stage {stage}, tp {tp}"
        return ""

    def _holdings(self, worker: Worker, number: int) -> tuple[int, ...]:
        """Its ranges by the cut of a committed record, whether or not it has heard of the go; () when known dead."""
        return worker.held if worker.shard_map == number else worker.new

    def _check_end(self, world: World, released: tuple[int, ...]) -> None:
        """The run is over: every iteration has been applied once, everywhere; nobody is left waiting."""
        record = self.protocol(world).committed
        assert record is not None
        waiting = {rank for rank, worker in enumerate(world.workers) if worker.alive and rank not in record.draining}
        self._check(waiting <= set(released), f"only {released} are released")
        number = self._intern_record(record)
        for rank in record.grid.ranks:
            worker = world.workers[rank]
            versions = {worker.held[element] for element in self.share(number, rank).elements} if worker.held else set()
            self._check(
                worker.shard_map == number
                and worker.position == self.num_iterations
                and versions == {self.num_iterations},
                f"rank {rank} ends at {worker.position} with versions {worker.held}",
            )

    @staticmethod
    def _check(condition: bool, message: str) -> None:
        if not condition:
            raise Violation(message)

    def describe(self, world: World) -> str:
        return ", ".join(
            f"rank {rank} {worker.mode} in generation {worker.generation} at {worker.position} {worker.inbox or ''}"
            for rank, worker in enumerate(world.workers)
        )

    # Tables

    def _put(self, world: World, rank: int, worker: Worker) -> World:
        workers = world.workers
        return world._replace(workers=(*workers[:rank], worker, *workers[rank + 1 :]))

    def _intern(self, protocol: MembershipProtocol) -> int:
        key = freeze(vars(protocol), self._frozen)
        if key not in self._protocol_ids:
            self._protocol_ids[key] = len(self._protocols)
            self._protocols.append(protocol)
        return self._protocol_ids[key]

    def _intern_record(self, record: GenerationRecord) -> int:
        key = freeze(record, self._frozen)
        if key not in self._record_ids:
            self._record_ids[key] = len(self._records)
            self._records.append(record)
        return self._record_ids[key]

    def _shard_map(self, record: GenerationRecord, grid: Grid, stage: int, tp: int) -> ShardMap:
        return plan_shard_map(
            grid, stage, tp, zero_stage=self.zero_stage, zero_backups=self.zero_backups, hosts=record.hosts
        )

    def _elements(self, shard_map: ShardMap, number: int) -> range:
        size = self.num_elements // shard_map.num_ranges
        return range(number * size, (number + 1) * size)

    def _share(self, number: int, rank: int) -> Share:
        record = self.record(number)
        at = record.grid.coordinates(rank)
        shard_map = self._shard_map(record, record.grid, at.pp, at.tp)
        own, *backed_up = shard_map.ranges_of(rank)
        return Share(
            group=record.grid.dp_ranks(at.pp, at.tp),
            own=tuple(self._elements(shard_map, own)),
            back=tuple(element for number in backed_up for element in self._elements(shard_map, number)),
            back_owner=shard_map.holders[backed_up[0]][0] if backed_up else rank,
        )

    def _sources(self, number: int, rank: int) -> tuple[tuple[int, int], ...]:
        """(source, element) of everything that a rank needs to enter a record."""
        record = self.record(number)
        if record.previous is None or not record.grid.holds(rank):
            return ()
        at = record.grid.coordinates(rank)
        old, new = (self._shard_map(record, grid, at.pp, at.tp) for grid in (record.previous, record.grid))
        held = self._table(old, record.members)
        return tuple(
            (move.source, element)
            for move in plan_moves(held, self._table(new, record.grid.ranks), self.num_elements)
            if move.target == rank
            for element in range(move.start, move.stop)
        )

    def _table(self, shard_map: ShardMap, ranks: tuple[int, ...]) -> dict[int, list[range]]:
        table = {rank: [self._elements(shard_map, number) for number in shard_map.ranges_of(rank)] for rank in ranks}
        return {rank: ranges for rank, ranges in table.items() if ranges}


TEXT = ("reason", "_reasons", "why")


def freeze(value: Any, memo: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """A hashable stand-in that leaves out texts; `memo` remembers those of frozen dataclasses."""
    if isinstance(value, (int, str, frozenset)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(freeze(item, memo) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, freeze(value[key], memo)) for key in sorted(value) if key not in TEXT)
    if not is_dataclass(value):
        return value
    if memo is not None and id(value) in memo:
        return memo[id(value)][1]
    frozen = tuple(freeze(getattr(value, field.name), memo) for field in fields(value) if field.name not in TEXT)
    if memo is not None:
        memo[id(value)] = value, frozen  # holding it keeps its id its own
    return frozen


class Explored(NamedTuple):
    num_worlds: int
    ends: dict[str, int]


def explore(model: Model, start: World, *, max_worlds: int = 10**6) -> Explored:
    """Visits every world that can be reached; raises Violation with a way to it."""
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    todo = [start]
    ends: dict[str, int] = {}
    while todo:
        world = todo.pop()
        if world.ended:
            ends[world.ended] = ends.get(world.ended, 0) + 1
        label = ""
        try:
            for label, make in model.moves(world):
                following = make()
                if following not in came_from:
                    came_from[following] = (world, label)
                    todo.append(following)
        except Violation as error:
            raise Violation(f"{error}\n{_way(came_from, world)}\n  {label}") from None
        assert len(came_from) <= max_worlds, f"more than {max_worlds} worlds"
    return Explored(len(came_from), ends)


def walk(model: Model, start: World, seed: int, *, fault_rate: float = 0.05, max_moves: int = 5000) -> World:
    """One random way to its end."""
    rng = random.Random(seed)
    world, labels = start, []
    for _ in range(max_moves):
        label = ""
        try:
            moves = model.moves(world)
            if not moves:
                return world
            faults = list(model._faults(world))
            steps = moves[: len(moves) - len(faults)]
            label, make = rng.choice(faults if faults and rng.random() < fault_rate else steps)
            world = make()
        except Violation as error:
            raise Violation("\n  ".join([str(error), *labels, label])) from None
        labels.append(label)
    raise Violation("\n  ".join([f"no end after {max_moves} moves", *labels[-100:]]))


def _way(came_from: dict[World, tuple[World, str] | None], world: World) -> str:
    labels = []
    while (step := came_from[world]) is not None:
        world, label = step
        labels.append(f"  {label}")
    return "\n".join(reversed(labels))
