"""Routes and instruction lists of one iteration, by an event-driven simulation with integer stage costs.

`plan_routes` says which replica handles a micro-batch at each stage. `plan_pipeline` lets every replica choose,
whenever it is idle, among the micro-batches that have reached it; the rule is only which kind of work it prefers and
how many micro-batches it may hold:

    gpipe     every forward before the first backward                                           (GPipe, Huang et al.)
    1f1b      a backward as soon as one is ready; at most P - stage + extra_in_flight forwarded but not yet backwarded
              micro-batches                                                   (PipeDream-flush, Narayanan et al. 2021)
    forward   no backward: evaluation

Stages may have different numbers of replicas (workers were lost): a micro-batch keeps its home replica where that is
alive, only the others are spread. On a straight grid the lists are the textbook's.

Why the lists can't deadlock: a replica starts a compute only when the slot for its result is free, so that in the
simulated run no send ever waits; lists with one run that ends have no run that doesn't. The simulation itself always
goes on, by induction over the stages: the first stage can always read a gradient, so the second can always send one,
and so on to the last, so backwards never stop, so the caps always free up, so forwards never stop. (With two stages and
one slot targets and activation share it: the activation is promised the slot that its targets leave at the last stage's
next pause, which depends on nobody.)

Messages of an ordered pair are read in the order sent, because only the oldest unread one of a pair may be chosen.
Targets are read with the forward that needs them, or earlier when their pair has no free slot (the first stage runs up
to P micro-batches ahead of the last one; with 3 slots it would wait for it).

Replicas that share no micro-batch don't influence each other, so the simulation runs once for each connected component,
and components of equal shape share one run: a straight grid costs as much as one of its columns.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from parallel3d.errors import ScheduleError
from parallel3d.pipeline.instructions import Instruction, Op, ReplicaId

Rule = Literal["gpipe", "1f1b", "forward"]
Routes = tuple[tuple[int, ...], ...]
"""routes[micro-batch][stage] = id of the replica."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """All that a plan depends on: ranks that hold the same request make the same plan."""

    replicas: tuple[tuple[int, ...], ...]
    """For each stage the ids of its live replicas, in any order and with gaps."""
    num_micro_batches: int
    rule: Rule
    forward_costs: tuple[int, ...]
    """Time units that one micro-batch takes at each stage, at least 1."""
    backward_costs: tuple[int, ...]
    slots: int = 3
    """Messages that an ordered pair of replicas can hold unread."""
    extra_in_flight: int = 0
    """Micro-batches that a replica may hold above 1F1B's P - stage."""

    def __post_init__(self) -> None:
        num_stages = len(self.replicas)
        broken = [
            (num_stages < 1, "there is no stage"),
            (not all(self.replicas), f"a stage has no replica: {self.replicas}"),
            (any(len(set(ids)) < len(ids) for ids in self.replicas), f"a replica id stands twice: {self.replicas}"),
            (self.num_micro_batches < 1, f"{self.num_micro_batches} micro-batches"),
            (self.rule not in ("gpipe", "1f1b", "forward"), f"unknown rule {self.rule!r}"),
            (len(self.forward_costs) != num_stages, f"{len(self.forward_costs)} forward costs, {num_stages} stages"),
            (len(self.backward_costs) != num_stages, f"{len(self.backward_costs)} backward costs, {num_stages} stages"),
            (min((*self.forward_costs, *self.backward_costs), default=1) < 1, "a stage costs less than 1"),
            (self.slots < 1, f"{self.slots} slots"),
            (self.extra_in_flight < 0, f"extra_in_flight {self.extra_in_flight}"),
        ]
        if reasons := [reason for is_broken, reason in broken if is_broken]:
            raise ScheduleError("no plan can be made: " + "; ".join(reasons))


class Event(NamedTuple):
    """One compute of the simulated run."""

    replica: ReplicaId
    op: Op
    micro_batch: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every replica does in one iteration, and how long that takes by the simulation."""

    request: PlanRequest
    routes: Routes
    lists: dict[ReplicaId, tuple[Instruction, ...]]
    """One list for each live replica; empty where no micro-batch comes by."""
    events: tuple[Event, ...]
    """By start and replica."""
    makespan: int
    busy: dict[ReplicaId, int]
    """Time units spent computing."""
    reason: str

    @property
    def bubble(self) -> float:
        """Share of the makespan in which the replicas with the most work are idle; (p-1)/(m+p-1) on a straight grid."""
        return 1 - max(self.busy.values()) / self.makespan

    @cached_property
    def digest(self) -> str:
        """Hash of all lists: ranks compare it before they start."""
        return digest_lists(self.lists)


def plan_routes(replicas: tuple[tuple[int, ...], ...], num_micro_batches: int) -> Routes:
    """routes[micro-batch][stage] = replica id.

    The home of micro-batch m is the (m mod H)-th of the H replica ids found at any stage. A micro-batch keeps its home
    at every stage where it is alive; elsewhere it goes to the replica with the least load of that stage, the lowest id
    first. Any two replicas of a stage then differ by at most one micro-batch, whatever was lost: homes differ by at
    most one, and the least loaded one is filled first.
    """
    homes = sorted({replica for ids in replicas for replica in ids})
    home_of = [homes[m % len(homes)] for m in range(num_micro_batches)]
    return tuple(zip(*(_route_stage(ids, home_of) for ids in replicas)))


def plan_pipeline(request: PlanRequest) -> Plan:
    """Routes, lists and simulated times of one iteration; the same request gives the same plan on every machine."""
    routes = plan_routes(request.replicas, request.num_micro_batches)
    lists: dict[ReplicaId, tuple[Instruction, ...]] = {
        (stage, replica): () for stage, ids in enumerate(request.replicas) for replica in sorted(ids)
    }
    events: list[Event] = []
    runs: dict[Routes, _Simulation] = {}
    for component in _split_components(routes):
        run = runs.get(component.shape)
        if run is None:
            run = runs[component.shape] = _Simulation(request, component.shape)
        lists.update(component.name_lists(run))
        events += component.name_events(run)
    events.sort(key=lambda event: (event.start, event.replica))
    makespan = max(event.end for event in events)
    busy = dict.fromkeys(lists, 0)
    for event in events:
        busy[event.replica] += event.end - event.start
    return Plan(
        request=request,
        routes=routes,
        lists=lists,
        events=tuple(events),
        makespan=makespan,
        busy=busy,
        reason=_explain(request, routes, makespan, busy),
    )


def digest_lists(lists: dict[ReplicaId, tuple[Instruction, ...]]) -> str:
    """Hash of all instruction lists, the same on every machine."""
    hashed = hashlib.blake2b(digest_size=16)
    for replica in sorted(lists):
        steps = [(step.op._value_, step.micro_batch, step.peer) for step in lists[replica]]
        hashed.update(repr((replica, steps)).encode())
    return hashed.hexdigest()


def _route_stage(ids: tuple[int, ...], home_of: list[int]) -> list[int]:
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


def _explain(request: PlanRequest, routes: Routes, makespan: int, busy: dict[ReplicaId, int]) -> str:
    counts = [len(ids) for ids in request.replicas]
    grid = str(counts[0]) if len(set(counts)) == 1 else "/".join(map(str, counts))
    rerouted = sum(len(set(route)) > 1 for route in routes)
    busiest = max(busy, key=lambda replica: busy[replica])
    return (
        f"{request.rule} on {len(counts)} stages x {grid} replicas, {len(routes)} micro-batches, {rerouted} rerouted: "
        f"{makespan} units, of which {busy[busiest]} are work of the busiest replica {busiest}"
    )


class _Component(NamedTuple):
    """Replicas connected by micro-batches, with their names; `shape` is its routes in positions instead of names."""

    micro_batches: list[int]
    replicas: list[ReplicaId]
    shape: Routes

    def name_lists(self, run: _Simulation) -> dict[ReplicaId, tuple[Instruction, ...]]:
        names: list[ReplicaId | None] = [*self.replicas, None]  # position -1: no peer
        micro_batches = self.micro_batches
        return {
            replica: tuple([Instruction(op, micro_batches[m], names[peer]) for op, m, peer in steps])
            for replica, steps in zip(self.replicas, run.lists)
        }

    def name_events(self, run: _Simulation) -> list[Event]:
        return [Event(self.replicas[r], op, self.micro_batches[m], start, end) for r, op, m, start, end in run.events]


def _split_components(routes: Routes) -> list[_Component]:
    """The connected components; positions keep the order of names, so that equal shapes have equal runs."""
    by_route: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for micro_batch, route in enumerate(routes):
        by_route[route].append(micro_batch)
    leader: dict[ReplicaId, ReplicaId] = {}

    def find(replica: ReplicaId) -> ReplicaId:
        while leader.setdefault(replica, replica) != replica:
            replica = leader[replica]
        return replica

    for route in by_route:
        for replica in enumerate(route):
            leader[find(replica)] = find((0, route[0]))
    groups: dict[ReplicaId, list[int]] = defaultdict(list)
    for micro_batch, route in enumerate(routes):
        groups[find((0, route[0]))].append(micro_batch)
    return [_name_component(routes, micro_batches) for micro_batches in groups.values()]


def _name_component(routes: Routes, micro_batches: list[int]) -> _Component:
    distinct = {routes[m] for m in micro_batches}
    replicas = sorted({replica for route in distinct for replica in enumerate(route)})
    position = {replica: i for i, replica in enumerate(replicas)}
    in_positions = {route: tuple(position[replica] for replica in enumerate(route)) for route in distinct}
    return _Component(micro_batches, replicas, tuple(in_positions[routes[m]] for m in micro_batches))


class _Simulation:
    """Runs one component to its end; leaves `lists` (op, micro-batch, peer or -1) and `events`, all in positions.

    A queue holds the unread messages of one ordered pair, oldest first, as micro-batches. The first stage finds its own
    micro-batches in a queue from itself, and so does the last stage for the gradients that its forwards make.
    """

    def __init__(self, request: PlanRequest, shape: Routes):
        self.routes = shape
        self.last = len(request.replicas) - 1
        self.slots = request.slots
        self.costs = {Op.FORWARD: request.forward_costs, Op.BACKWARD: request.backward_costs}
        self.trains = request.rule != "forward"
        self.backward_at_once = request.rule == "1f1b"
        self.stage_of = [stage for _, stage in sorted({(r, stage) for route in shape for stage, r in enumerate(route)})]
        num_replicas = len(self.stage_of)
        self.forwards_left = [0] * num_replicas
        for route in shape:
            for replica in route:
                self.forwards_left[replica] += 1
        self.allowance = [
            self.last + 1 - stage + request.extra_in_flight if self.backward_at_once else len(shape)
            for stage in self.stage_of
        ]  # forwards that may still be started before a backward must end
        self.is_busy = [False] * num_replicas
        self.activations: list[dict[int, deque[int]]] = [defaultdict(deque) for _ in self.stage_of]
        self.gradients: list[dict[int, deque[int]]] = [defaultdict(deque) for _ in self.stage_of]
        self.targets: list[dict[int, deque[int]]] = [defaultdict(deque) for _ in self.stage_of]
        self.has_targets = [False] * len(shape)
        self.used: dict[tuple[int, int], int] = defaultdict(int)  # slots of a pair: unread, and promised to a compute
        self.lists: list[list[tuple[Op, int, int]]] = [[] for _ in self.stage_of]
        self.events: list[tuple[int, Op, int, int, int]] = []
        self.awake: list[int] = []  # idle replicas that may have something to do now, as a heap of -position
        self.running: list[tuple[int, int, bool, int]] = []  # heap of (end, replica, is backward, micro-batch)
        self._run()

    def _run(self) -> None:
        for micro_batch, route in enumerate(self.routes):
            self.activations[route[0]][route[0]].append(micro_batch)
            self._wake(route[0])
        self._start_all(now=0)
        while self.running:
            now = self.running[0][0]
            while self.running and self.running[0][0] == now:
                _, replica, is_backward, micro_batch = heappop(self.running)
                self._finish(replica, is_backward, micro_batch)
            self._start_all(now)
        assert not any(self.forwards_left), "the simulation stopped early"

    def _wake(self, replica: int) -> None:
        if not self.is_busy[replica]:
            heappush(self.awake, -replica)

    def _start_all(self, now: int) -> None:
        """Later stages first: what they read frees slots for earlier ones."""
        while self.awake:
            replica = -heappop(self.awake)
            if not self.is_busy[replica]:
                self._start(replica, now)

    def _start(self, replica: int, now: int) -> None:
        """Starts the rule's choice among the oldest messages of each pair, the lowest micro-batch first."""
        self._read_targets_of_full_pairs(replica)
        if self.backward_at_once or not self.forwards_left[replica]:
            ready = self._ready(replica, self.gradients[replica], self._fits_back)
            if ready:
                self._start_backward(replica, *min(ready), now)
                return
        if self.allowance[replica]:
            ready = self._ready(replica, self.activations[replica], self._fits)
            if ready:
                self._start_forward(replica, *min(ready), now)

    @staticmethod
    def _ready(replica: int, queues: dict[int, deque[int]], fits: Callable[[int, int], bool]) -> list[tuple[int, int]]:
        """(micro-batch, source) of the oldest message of each pair, where there are slots for the result."""
        return [(queue[0], source) for source, queue in queues.items() if queue and fits(replica, queue[0])]

    def _fits(self, replica: int, micro_batch: int) -> bool:
        """Whether the slots for a forward's messages are free."""
        route, stage = self.routes[micro_batch], self.stage_of[replica]
        if stage == self.last:
            return True
        if stage == 0 and self.last == 1:  # targets and activation share the pair; one slot serves them in turn
            return self.used[replica, route[1]] + 2 <= max(self.slots, 2)
        if stage == 0 and self.used[replica, route[-1]] >= self.slots:
            return False
        return self.used[replica, route[stage + 1]] < self.slots

    def _fits_back(self, replica: int, micro_batch: int) -> bool:
        stage = self.stage_of[replica]
        return stage == 0 or self.used[replica, self.routes[micro_batch][stage - 1]] < self.slots

    def _start_forward(self, replica: int, micro_batch: int, source: int, now: int) -> None:
        route, stage, steps = self.routes[micro_batch], self.stage_of[replica], self.lists[replica]
        self.activations[replica][source].popleft()
        if stage == 0:
            steps.append((Op.LOAD, micro_batch, -1))
            if self.last:
                self._send(Op.SEND_TARGETS, replica, micro_batch, route[-1])
                self.targets[route[-1]][replica].append(micro_batch)
                self._wake(route[-1])
        else:
            while stage == self.last and not self.has_targets[micro_batch]:
                self._read_targets(replica, route[0])
            self._receive(Op.RECV_ACTIVATION, replica, micro_batch, source)
        steps.append((Op.FORWARD, micro_batch, -1))
        if stage < self.last:
            self._send(Op.SEND_ACTIVATION, replica, micro_batch, route[stage + 1])
        self.forwards_left[replica] -= 1
        self.allowance[replica] -= 1
        self._compute(replica, Op.FORWARD, micro_batch, now)

    def _start_backward(self, replica: int, micro_batch: int, source: int, now: int) -> None:
        stage = self.stage_of[replica]
        self.gradients[replica][source].popleft()
        if stage < self.last:
            self._receive(Op.RECV_GRADIENT, replica, micro_batch, source)
        self.lists[replica].append((Op.BACKWARD, micro_batch, -1))
        if stage:
            self._send(Op.SEND_GRADIENT, replica, micro_batch, self.routes[micro_batch][stage - 1])
        self._compute(replica, Op.BACKWARD, micro_batch, now)

    def _compute(self, replica: int, op: Op, micro_batch: int, now: int) -> None:
        end = now + self.costs[op][self.stage_of[replica]]
        self.is_busy[replica] = True
        self.events.append((replica, op, micro_batch, now, end))
        heappush(self.running, (end, replica, op is Op.BACKWARD, micro_batch))

    def _finish(self, replica: int, is_backward: bool, micro_batch: int) -> None:
        """Delivers the result: the slot was promised at the start."""
        stage, route = self.stage_of[replica], self.routes[micro_batch]
        self.is_busy[replica] = False
        self._wake(replica)
        if is_backward:
            self.allowance[replica] += 1
            if stage:
                self.gradients[route[stage - 1]][replica].append(micro_batch)
                self._wake(route[stage - 1])
        elif stage < self.last:
            self.activations[route[stage + 1]][replica].append(micro_batch)
            self._wake(route[stage + 1])
        elif self.trains:
            self.gradients[replica][replica].append(micro_batch)

    def _send(self, op: Op, replica: int, micro_batch: int, peer: int) -> None:
        self.lists[replica].append((op, micro_batch, peer))
        self.used[replica, peer] += 1

    def _receive(self, op: Op, replica: int, micro_batch: int, peer: int) -> None:
        self.lists[replica].append((op, micro_batch, peer))
        self.used[peer, replica] -= 1
        self._wake(peer)

    def _read_targets(self, replica: int, source: int) -> None:
        micro_batch = self.targets[replica][source].popleft()
        self.has_targets[micro_batch] = True
        self._receive(Op.RECV_TARGETS, replica, micro_batch, source)

    def _read_targets_of_full_pairs(self, replica: int) -> None:
        """Frees a slot of each full pair that holds targets.

        With two stages they share the pair with the activations: only one slot asks for it, and then they are alone.
        """
        if self.last == 1 and self.slots > 1:
            return
        for source, queue in self.targets[replica].items():
            if queue and self.used[source, replica] >= self.slots:
                self._read_targets(replica, source)
