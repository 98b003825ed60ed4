"""An explicit-state model checker for the membership protocol: the real Protocol, modelled workers and network.

A world is one immutable value: the protocol's state, the workers with what they hold, the frames in flight. `moves`
lists every world that can come next; `explore` visits all that can be reached, `walk` follows one random way
(protocol_search.py). A broken invariant raises Violation with the way that led there.

A worker in iteration i, on the ranges that it owns (own) and those that it backs up (back)::

    step 4i      own: its range's reduced gradient is there        needs all of its stage in iteration i
                 back: so is that of the range it backs up         needs its owner's
    step 4i + 2  holds entry i                                     needs own and back of every rank of the grid
    step 4i + 3  has updated both ranges: their version is i
    step 4i + 4  has gathered the weights: next iteration          needs all of its stage at 4i + 3

It runs until it takes an abort; then it reports, takes the record (brings its ranges to the record's position:
resolves), gets its new ranges and confirms; with the commit it frees the old ones and runs again. It may die between
any two moves. A sum or a copy in flight when a worker dies may still arrive: collectives ask only how far a worker
has come.

With `reduced`, not every order of moves that commute is tried: protocol_reduction.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from operator import le

from parallel3d.elastic.protocol.actions import (
    AbortGeneration,
    Action,
    ChangeRequest,
    Commit,
    DrainRefused,
    DrainRequest,
    FetchEntries,
    FinishRun,
    Propose,
    StopRun,
)
from parallel3d.elastic.protocol.membership import (
    NO_GENERATION,
)
from parallel3d.errors import ProtocolError
from tests.support.protocol_events import feed
from tests.support.protocol_reduction import ReducedModel
from tests.support.protocol_world import (
    DEAD,
    DONE,
    MISSING,
    RESOLVED,
    RUN,
    SPARE,
    Frame,
    Step,
    Violation,
    Worker,
    World,
)


class Model(ReducedModel):
    """The rules of one world: what may happen next, the coordinator, and what must never be."""

    def start(self, *, deaths: int = 0, **faults: int) -> World:
        """The world in which no worker has reported to generation 0 yet."""
        workers = tuple(
            Worker(inbox=(("abort_generation", 0),), part=self.grid.part(rank)) for rank in self.grid.ranks
        )
        return World(protocol=self._intern(self._first), workers=workers, deaths=deaths, **faults)

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
        if self.reduced and self._goes_straight_on(world):
            moves = moves[:1]
        return [*moves, *self._faults(world)]

    def _eager_moves(self, world: World) -> Iterator[Step]:
        for rank, worker in enumerate(world.workers):
            if worker.outbox:
                yield f"{worker.outbox[0]} of rank {rank} arrives", lambda r=rank: self._deliver(world, r)
        for rank, worker in enumerate(world.workers):
            if worker.inbox and self.is_taken_at_once(world, worker.inbox[0]) and not worker.has_abort:
                yield f"rank {rank} takes {worker.inbox[0]}", lambda r=rank: self._take(world, r)
            if worker.mode == RUN and not worker.has_abort and self._can_gather(world, rank):
                yield f"rank {rank} gathers", lambda r=rank: self._put(world, r, self._gather(r, world.workers[r]))
            if worker.has_abort:
                return
            if worker.mode == RESOLVED and self._is_confirmed_unseen(world, rank):
                yield f"rank {rank} confirms", lambda r=rank: self._confirm_now(world, r)

    def is_taken_at_once(self, world: World, frame: Frame) -> bool:
        """Whether nothing else depends on when a worker takes this frame."""
        return frame[0] not in ("record", "fetch_entries")

    def _frames(self, world: World) -> Iterator[Step]:
        """Frames that arrive. An abort takes effect at once, even if the frames before it have not been handled."""
        aborted = False
        for rank, worker in enumerate(world.workers):
            if worker.outbox and rank not in world.silent:
                yield f"{worker.outbox[0]} of rank {rank} arrives", lambda r=rank: self._deliver(world, r)
            if not worker.alive:
                continue
            if worker.has_abort and not (self.reduced and aborted):
                aborted = True
                yield f"rank {rank} takes its abort", lambda r=rank: self._take_abort(world, r)
            if worker.inbox and worker.inbox[0][0] != "abort_generation" and not (self.reduced and worker.has_abort):
                yield f"rank {rank} takes {worker.inbox[0]}", lambda r=rank: self._take(world, r)
        for rank in world.unseen:
            yield f"rank {rank} is found dead", lambda r=rank: self._notice(world, r)
        if world.silent:
            yield f"the guardian of {world.silent} is found silent", lambda: self._find_silent(world)

    def _steps(self, world: World) -> Iterator[Step]:
        """Moves of the workers themselves."""
        for rank, worker in enumerate(world.workers):
            if self.reduced and worker.has_abort:
                continue
            for label, make in self._worker_steps(world, rank, worker):
                yield f"rank {rank} {label}", lambda r=rank, m=make: self._put(world, r, m())

    def _faults(self, world: World) -> Iterator[Step]:
        for rank, worker in enumerate(world.workers):
            if worker.alive and world.deaths and rank not in world.silent:
                yield f"rank {rank} dies", lambda r=rank: self._kill(world, r)
            if worker.alive and not worker.evicted and world.false_deaths:
                yield f"rank {rank} is taken for dead", lambda r=rank: self._evict(world, r)
            if world.host_deaths and worker.alive and self.grid.holds(rank) and rank == self._on_host(rank)[0]:
                yield f"the host of rank {rank} dies", lambda r=rank: self._kill_host(world, r)
            if world.relay_stops and worker.alive and rank == self._on_host(rank)[0] and not world.silent:
                yield f"the guardian of rank {rank} stops", lambda r=rank: self._stop_relay(world, r, passed_on=True)
                yield (
                    f"the guardian of rank {rank} stops, with frames for its workers",
                    lambda r=rank: self._stop_relay(world, r, passed_on=False),
                )
            if worker.mode in (RUN, RESOLVED, DONE) and world.suspicions:
                yield f"rank {rank} suspects", lambda r=rank: self._suspect(world, r)
            if worker.alive and world.drains:
                yield (
                    f"rank {rank} is asked to leave",
                    lambda r=rank: self._submit(world._replace(drains=world.drains - 1), ("announce_drain", r)),
                )
        if world.joins:
            for part in sorted({self.grid.part(rank) for rank in self.grid.ranks}):
                yield f"a new worker has built {part}", lambda p=part: self._join(world, p)

    # Faults

    def _kill(self, world: World, rank: int) -> World:
        world = self._put(world, rank, world.workers[rank]._replace(mode=DEAD, inbox=()))
        world = world._replace(deaths=world.deaths - 1, unseen=tuple(sorted((*world.unseen, rank))))
        return self._notice(world, rank) if self.reduced else world

    def _evict(self, world: World, rank: int) -> World:
        """The coordinator takes a worker for dead that runs on: nobody listens to it any more."""
        world = world._replace(false_deaths=world.false_deaths - 1)
        return self._notice_lost(self._put(world, rank, world.workers[rank]._replace(evicted=True)), (rank,))

    def _join(self, world: World, part: tuple[int, int]) -> World:
        """A new worker, with a number that no other one has had, has built its part of the model and says so."""
        worker = Worker(mode=SPARE, part=part, held=(MISSING,) * self.num_elements)
        world = world._replace(workers=(*world.workers, worker), joins=world.joins - 1)
        return self._submit(world, ("admit", len(world.workers) - 1, part))

    def _on_host(self, rank: int) -> list[int]:
        return [other for other in self.grid.ranks if self.hosts[other] == self.hosts[rank]]

    def _kill_host(self, world: World, rank: int) -> World:
        """A guardian dies with its workers; of what it was relaying, a part may still arrive before this is noticed."""
        world = world._replace(host_deaths=world.host_deaths - 1)
        ranks = tuple(other for other in self._on_host(rank) if world.workers[other].alive)
        for other in ranks:
            world = self._put(world, other, Worker(mode=DEAD, part=world.workers[other].part))
        return self._notice_lost(world, ranks)

    def _stop_relay(self, world: World, rank: int, *, passed_on: bool) -> World:
        """A guardian stops. What of its batch had arrived is a move before this one; `passed_on`: so is what it had for
        its workers."""
        ranks = tuple(other for other in self._on_host(rank) if world.workers[other].alive)
        for other in () if passed_on else ranks:
            world = self._put(world, other, world.workers[other]._replace(inbox=()))
        return world._replace(relay_stops=world.relay_stops - 1, silent=ranks)

    def _find_silent(self, world: World) -> World:
        """The coordinator takes all workers of a silent guardian for dead."""
        ranks = self.lost_with_guardian(world.silent)
        for rank in ranks:
            world = self._put(world, rank, world.workers[rank]._replace(evicted=True))
        return self._notice_lost(world._replace(silent=()), ranks)

    def lost_with_guardian(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return ranks

    def _notice_lost(self, world: World, ranks: tuple[int, ...]) -> World:
        protocol = self.protocol(world)
        if protocol.over or not (protocol.live | protocol._ready).intersection(ranks):
            return world
        world = self._submit(world, ("lost_together", ranks))
        lost = self.what_is_lost(world)
        self._check(bool(world.ended) == bool(lost), f"ended {world.ended!r} where {lost or 'nothing'} is lost")
        return world

    def _notice(self, world: World, rank: int) -> World:
        world = self.bury(world, rank)
        before = self.protocol(world)
        if before.over or rank not in before.live | before._ready:
            return world
        world = self._submit(world, ("on_lost", rank))
        lost = self.what_is_lost(world)
        if world.ended:
            self._check(lost != "", "halted although nothing is lost")
        else:
            self._check(lost == "", f"goes on without {lost}")
        return world

    def bury(self, world: World, rank: int) -> World:
        """Takes notice of a death: the worker holds nothing any more, but what it has sent may still arrive."""
        worker = world.workers[rank]
        sent = {} if self.reduced else {name: getattr(worker, name) for name in ("run", "step", "own", "back")}
        world = self._put(world, rank, Worker(mode=DEAD, part=worker.part, **sent))
        return world._replace(unseen=tuple(other for other in world.unseen if other != rank))

    def _suspect(self, world: World, rank: int) -> World:
        worker = world.workers[rank]
        record = worker.proposed if worker.mode == RESOLVED else worker.run
        world = world._replace(suspicions=world.suspicions - 1)
        return self._put(world, rank, self._ask_for_change(worker, record))

    # The coordinator

    def _deliver(self, world: World, rank: int) -> World:
        worker = world.workers[rank]
        (kind, generation, *rest), outbox = worker.outbox[0], worker.outbox[1:]
        world = self._put(world, rank, worker._replace(outbox=outbox))
        if kind == "request_record":
            self.requests.add((kind, rank, generation))
            return self._send_whole_record(world, rank, generation)
        if kind == "ready":
            protocol = self.protocol(world)  # a successor may know
            is_known = rank in protocol.live | protocol._ready
            return world if is_known else self._submit(world, ("admit", rank, *rest))
        if kind != "report":
            return self._submit(world, (kind, rank, generation, *rest))
        is_new = worker.shard_map == NO_GENERATION or worker.has_moved
        state_generation = NO_GENERATION if is_new else self.record(worker.shard_map).generation
        version = min((v for v in worker.held if v != MISSING), default=0)
        return self._submit(world, (kind, rank, generation, state_generation, max(worker.position, 0), version))

    def _submit(self, world: World, event: Frame) -> World:
        """Feeds the protocol and carries out its actions."""
        key = (world.protocol, event)
        if key not in self._answers:
            protocol = copy.copy(self.protocol(world))
            try:
                actions = feed(protocol, event, self.hosts)
            except ProtocolError as error:
                raise Violation(f"{event}: {error}") from error
            self._answers[key] = self._intern(protocol), actions
        number, actions = self._answers[key]
        world = world._replace(protocol=number)
        for action in actions:
            world = self._carry_out(world, action, event)
        return world

    def _carry_out(self, world: World, action: Action, event: Frame) -> World:
        match action:
            case AbortGeneration(ranks=ranks, generation=generation):
                return self._send(world, ranks, ("abort_generation", generation))
            case FetchEntries(rank=rank, generation=generation):
                return self._send(world, (rank,), ("fetch_entries", generation))
            case Propose():
                return self._propose(world, action)
            case Commit(generation=generation, members=members):
                return self._send(world, members, ("commit", generation))
            case DrainRequest(rank=rank):
                return self._send(world, (rank,), ("drain_request",))
            case ChangeRequest(rank=rank, generation=generation):
                return self._send(world, (rank,), ("change_request", generation))
            case DrainRefused(rank=rank):
                return self._send(world, (rank,), ("stay",))
            case FinishRun(ranks=ranks):
                self._check_end(world, ranks)
                return world._replace(ended="released")
            case StopRun(reason=reason):
                self._check(event[0] in ("on_lost", "lost_together"), f"halted by {event}: {reason}")
                return world._replace(ended="halted")
        raise AssertionError(action)

    def _propose(self, world: World, action: Propose) -> World:
        """Sends the difference from the base, with the entries to those that are behind."""
        record = self._intern_record(action.record)
        base = NO_GENERATION if action.base is None else self._intern_record(action.base)
        strangers = set(action.record.grid.ranks) - set(action.record.members)
        self._check(not strangers, "places workers that have not reported")
        for rank in action.record.grid.ranks:
            built = world.workers[rank].part
            self._check(built == action.record.grid.part(rank), f"places rank {rank}, which has built {built}")
        widths = [len(stage) for stage in action.record.grid.stages]
        self._check(all(map(le, widths, self.target.widths)), f"widens the grid to {widths}")
        is_stale = action.record.weights_gathered and action.record.joiners
        self._check(not is_stale, "a joiner's weights count as gathered")
        if action.behind:
            self._check(action.entries == str(action.record.position.iteration).encode(), "sends other entries")
        for rank in action.record.members:
            world = self._send(world, (rank,), ("record", record, base, rank in action.behind))
        return world

    def _send_whole_record(self, world: World, rank: int, generation: int) -> World:
        record = self.protocol(world)._record
        if record is None or record.generation != generation:
            return world
        is_behind = world.workers[rank].position < record.position.iteration
        return self._send(world, (rank,), ("record", self._intern_record(record), NO_GENERATION, is_behind))

    def _send(self, world: World, ranks: tuple[int, ...], frame: Frame) -> World:
        workers = list(world.workers)
        for rank in ranks:
            if workers[rank].alive and rank not in world.silent:
                workers[rank] = workers[rank]._replace(inbox=(*workers[rank].inbox, frame))
        return world._replace(workers=tuple(workers))

    # Invariants

    def what_is_lost(self, world: World) -> str:
        """The first stage or element that no worker has, found in what the workers really hold; "" if none is lost."""
        record = self.protocol(world).committed
        grid = self.grid if record is None else record.grid
        known = [
            (worker.alive and not worker.evicted) or rank in world.unseen for rank, worker in enumerate(world.workers)
        ]
        parts = {worker.part for rank, worker in enumerate(world.workers) if known[rank]}
        for stage in range(self.grid.pp_size):
            if any((stage, tp) not in parts for tp in range(self.grid.tp_size)):
                return f"stage {stage}"
        if record is None:
            return ""
        number = self._intern_record(record)
        for stage in range(grid.pp_size):
            for tp in range(self.grid.tp_size):
                held = [self._holdings(world.workers[r], number) for r in grid.dp_ranks(stage, tp)]
                for element in range(self.num_elements):
                    if all(not versions or versions[element] == MISSING for versions in held):
                        return f"element {element} of stage {stage}, tp {tp}"
        return ""

    def _holdings(self, worker: Worker, number: int) -> tuple[int, ...]:
        """The worker's ranges by a committed record's shard map, whether or not the commit has arrived; () if dead."""
        if worker.evicted:
            return ()
        return worker.held if worker.shard_map == number else worker.new

    def _check_end(self, world: World, released: tuple[int, ...]) -> None:
        """Checks a finished run: each rank has applied every iteration once, and no worker is left waiting."""
        record = self.protocol(world).committed
        assert record is not None
        waiting = {
            rank
            for rank, worker in enumerate(world.workers)
            if worker.alive and not worker.evicted and rank not in record.draining
        }
        waiting -= self.protocol(world)._released  # they still build, and are ended
        waiting -= {rank for rank in waiting if self._may_leave(world.workers[rank], rank)}
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

    def _may_leave(self, worker: Worker, rank: int) -> bool:
        """Whether a commit is on its way with which this worker leaves."""
        has_commit = any(frame[0] == "commit" for frame in worker.inbox)
        return has_commit and worker.proposed != NO_GENERATION and rank in self.record(worker.proposed).draining

    def describe(self, world: World) -> str:
        return ", ".join(
            f"rank {rank} {worker.mode} in generation {worker.generation} at {worker.position} {worker.inbox or ''}"
            for rank, worker in enumerate(world.workers)
        )
