"""The event-driven simulation of one component, with integer stage costs: what each replica computes, and when.

Whenever a replica is idle it chooses among the micro-batches that have reached it, the oldest message of each ordered
pair, the lowest micro-batch first. The rule says which kind of work comes first and how many micro-batches it may hold:

    gpipe       every forward before the first backward                                        (GPipe, Huang et al.)
    1f1b        a forward while fewer than P - stage + extra_in_flight micro-batches are forwarded but not yet
                backwarded, else a backward                            (PipeDream-flush, Narayanan et al. 2021)
    interleaved 1f1b with several chunks of layers a stage, below                  (Narayanan et al. 2021, section 2.2)
    zb-h1       1f1b with a split backward, below          (Qi et al. 2023, "Zero bubble pipeline parallelism", 2.1)
    forward     no backward: evaluation

A forward comes first because it is what later stages wait for; on a straight grid nothing is ever there to choose from.

With a split backward, T_B for the inputs and T_W for the weights, the weights' half runs when nothing else can, and no
replica holds more than P + extra_in_flight micro-batches from their forward to the end of that half: no more than
1f1b's first stage holds anyway. On a straight grid of equal costs that is ZB-H1, whose bubble is
(P - 1)(T_F + T_B - T_W) where 1f1b's is (P - 1)(T_F + T_B + T_W): the paper's table 2. With extra_in_flight a backward
comes before a forward, because there is then room to be generous: pp4 x dp4 with one replica lost takes 34 units
instead of 36.

With V chunks a stage's work comes in *slices*, (micro-batch, chunk), in the paper's order: groups of P micro-batches
for each pipeline, a group's first chunk, its second, ..., and its backwards from the last chunk to the first. A replica
with n micro-batches of a group (P on a straight grid) may hold

    (V - 1) n + 2 (P - 1 - stage) + 1 + extra_in_flight

slices, and a forward counts those before it in this order that have not come yet, so that it can't lock them out.
Where a component is one pipeline whose number of micro-batches P divides, each replica waits for what is next in this
order: the lists are the paper's, and with equal costs their bubble is (P - 1)(F + B) / V, F and B those of a whole
stage and one micro-batch. Elsewhere a replica takes the first slice that is there: pp4 x dp4 without one replica takes
3 % more than the work of the busiest replica (V = 2, split backward).

Why the lists can't deadlock: a replica starts a compute only when the slot for its result is free, so that in the
simulated run no send ever waits; lists with one run that ends have no run that doesn't. The simulation itself always
goes on, by induction over the stages: there are finitely many forwards, so the first stage always comes to read a
gradient, so the second can always send one, and so on to the last, so backwards never stop; the halves for the weights
need no message and send none, so they never stop either; so the caps always free up, so forwards never stop. (With two
stages and one slot targets and activation share it: the activation is promised the slot that its targets leave at the
last stage's next pause. There it reads in the order in which messages came, so that it never waits for somebody who
waits for that slot; in another order one damaged grid in a hundred got stuck.)

With chunks the pairs close a ring. So there the reader of a full pair reads at its next pause what it does not need
yet: slots stop nobody for longer than that. And room? If all stood still, let s be the first slice whose forward is
missing. All groups before its own would be done, backwards included, and if s is of the last chunk so would be the
micro-batches of its group before it. Then at most (V - 1) n slices count against s: there is room for it.

Messages of an ordered pair are read in the order sent: without chunks because only the oldest unread one of a pair may
be chosen; with chunks, where a pair carries activations, gradients and targets, those before the one that is needed
are read with it and kept. Targets are read with the forward that needs them, or earlier when their pair has no free
slot (the first stage runs up to P micro-batches ahead of the last one; with 3 slots it would wait for it).

A run that is only wanted if it ends by some time is given up as soon as one replica can't be ready by then: its work
that is left, and behind its last message the backwards of all stages before it, take too long.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from parallel3d.pipeline.instructions import Op
from parallel3d.pipeline.request import PlanRequest, Routes

_FORWARD = Op.FORWARD  # a look-up less
_BACKWARD, _BACKWARD_INPUT, _BACKWARD_WEIGHT = Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
_READ_TARGETS, _READ_ACTIVATION, _READ_GRADIENT = Op.RECV_TARGETS, Op.RECV_ACTIVATION, Op.RECV_GRADIENT

_Message = tuple[Op, int]
"""(the receive that takes it, number of the slice)"""
_Lanes = dict[int, deque[int]]

Slice = tuple[int, int]
"""(micro-batch, chunk)"""
Step = tuple[Op, int, int]
"""(op, number of a slice, start): a compute of the simulated run, or a message read before what needs it."""


class Run(NamedTuple):
    """How one component runs; replicas and micro-batches are positions."""

    slices: list[Slice]
    """By number, which is the order of forwards; without chunks they are the micro-batches."""
    steps: list[list[Step]]
    """Of each replica, in order."""
    makespan: int


def simulate(request: PlanRequest, shape: Routes, limit: int | None = None) -> Run | int:
    """The run of one component, or, when it would end after `limit`, a time before which it can't end."""
    simulation = _Simulation(request, shape, float("inf") if limit is None else limit)
    late = simulation.run()
    return Run(simulation.slices, simulation.steps, simulation.now) if late is None else late


def least_makespan(request: PlanRequest, loads: Iterable[tuple[int, int]]) -> int:
    """No run with these (stage, micro-batches of one of its replicas) can be shorter."""
    heads = list(accumulate(request.costs.forward, initial=0))
    tails, work = _tails(request), request.work
    return max(heads[stage] + num_micro_batches * work[stage] + tails[stage] for stage, num_micro_batches in loads)


def _tails(request: PlanRequest) -> list[int]:
    """What must at least follow after a stage has done all of its work: it does the first chunk's backward last."""
    costs = request.costs
    if not request.trains:
        last_chunk = costs.forward[-request.num_stages :]
        return [sum(last_chunk[stage + 1 :]) for stage in range(request.num_stages)]
    if request.splits:  # the halves for the weights may all come after the last message
        return [0] * request.num_stages
    return [sum(costs.backward[:stage]) for stage in range(request.num_stages)]


def _order_slices(request: PlanRequest, shape: Routes) -> tuple[list[Slice], list[int]]:
    """All slices in the order of their forwards, and of each the place in the order of backwards.

    Groups of P micro-batches for each pipeline pass the first chunk, then the second ..., and back from the last chunk.
    """
    chunks = range(request.virtual_stages)
    if len(chunks) == 1:
        return [(micro_batch, 0) for micro_batch in range(len(shape))], list(range(len(shape)))
    size = _group_size(request, shape)
    groups = [range(start, min(start + size, len(shape))) for start in range(0, len(shape), size)]
    forwards = [(micro_batch, chunk) for group in groups for chunk in chunks for micro_batch in group]
    backwards = [(micro_batch, chunk) for group in groups for chunk in reversed(chunks) for micro_batch in group]
    place = {a_slice: number for number, a_slice in enumerate(backwards)}
    return forwards, [place[a_slice] for a_slice in forwards]


def _turns(routes: list[tuple[int, ...]]) -> list[list[int]]:
    """By stage and slice: the place among the slices of its replica."""
    counts: Counter[int] = Counter()
    turns: list[list[int]] = [[] for _ in routes[0]]
    for route in routes:
        for places, replica in zip(turns, route):
            places.append(counts[replica])
            counts[replica] += 1
    return turns


def _group_size(request: PlanRequest, shape: Routes) -> int:
    return request.num_stages * max(len(set(column)) for column in zip(*shape))


def _rooms(request: PlanRequest, shape: Routes, stage_of: list[int]) -> list[int]:
    """How many slices each replica may hold between their forwards and their backwards."""
    num_stages, extra = request.num_stages, request.extra_in_flight
    if request.virtual_stages > 1:
        size = _group_size(request, shape)
        shares = Counter((number // size, replica) for number, route in enumerate(shape) for replica in route)
        share = [0] * len(stage_of)  # of a group of micro-batches, at most
        for (_, replica), count in shares.items():
            share[replica] = max(share[replica], count)
        above = [2 * (num_stages - 1 - stage) + 1 + extra for stage in stage_of]
        return [(request.virtual_stages - 1) * held + more for held, more in zip(share, above)]
    if request.limits_in_flight:
        return [num_stages - stage + extra for stage in stage_of]
    return [len(shape)] * len(stage_of)


class _Simulation:
    """Runs one component to its end, or until it is late.

    A lane holds what a replica may compute next, oldest first, as numbers of slices: what came over one ordered pair;
    the first stage's own micro-batches; the last stage's own gradients. With chunks every slice has a lane of its own.
    """

    def __init__(self, request: PlanRequest, shape: Routes, limit: float):
        costs, num_stages = request.costs, request.num_stages
        self.slices, self.backward_order = _order_slices(request, shape)
        self.routes = [shape[micro_batch] for micro_batch, _ in self.slices]
        self.chunk_of = [chunk for _, chunk in self.slices]
        number_of = {a_slice: number for number, a_slice in enumerate(self.slices)}
        self.next_chunk = [number_of.get((micro_batch, chunk + 1), -1) for micro_batch, chunk in self.slices]
        self.previous_chunk = [number_of.get((micro_batch, chunk - 1), -1) for micro_batch, chunk in self.slices]
        self.num_stages, self.last = num_stages, num_stages - 1
        self.last_chunk = request.virtual_stages - 1
        self.slots = request.slots
        takes_two = self.last_chunk and self.last == 1  # a forward's targets and activation go into one pair
        self.full = max(1, self.slots - 1) if takes_two else self.slots
        """With so many slots of a pair taken its reader reads early."""
        self.limit = limit
        self.trains, self.splits = request.trains, request.splits
        self.early_backwards = request.rule != "gpipe"
        self.backward_first = request.splits and request.limits_in_flight and request.extra_in_flight > 0
        self.backward_op = _BACKWARD_INPUT if request.splits else _BACKWARD
        self.forward_costs, self.weight_costs = costs.forward, costs.backward_weight
        self.backward_costs = costs.backward_input if request.splits else costs.backward
        self.stage_of = [stage for _, stage in sorted({(r, stage) for route in shape for stage, r in enumerate(route)})]
        self.num_replicas = len(self.stage_of)
        counts = Counter(replica for route in shape for replica in route)
        self.forwards_left = [counts[replica] * request.virtual_stages for replica in range(self.num_replicas)]
        tails, work = _tails(request), request.work
        self.left = [counts[replica] * work[stage] + tails[stage] for replica, stage in enumerate(self.stage_of)]
        """Time that must at least pass from now on, once a replica is not idle any more."""
        self.room = _rooms(request, shape, self.stage_of)
        """Forwards that may still be started before a backward must end."""
        held_by_first = max(self.room) if request.limits_in_flight else len(self.slices)
        self.free = [held_by_first if request.splits else len(self.slices)] * self.num_replicas
        """Forwards that may still be started before the weight's half of a backward must end."""
        self.in_order = self.last_chunk > 0 and len(set(shape)) == 1 and len(shape) % num_stages == 0
        """Whether each replica waits for what comes next by the paper's order, whatever else could be done."""
        self.turns = _turns(self.routes) if self.last_chunk else []
        """Of each slice at each stage: how many forwards of its replica come before it."""
        self.forwards_begun = [0] * self.num_replicas
        self.backwards_begun = [0] * self.num_replicas
        self.is_busy = [False] * self.num_replicas
        self.activations: list[_Lanes] = [defaultdict(deque) for _ in self.stage_of]
        self.gradients: list[_Lanes] = [defaultdict(deque) for _ in self.stage_of]
        self.unread: list[dict[int, deque[_Message]]] = [defaultdict(deque) for _ in self.stage_of]
        self.arrivals: list[dict[_Message, int]] = [{} for _ in self.stage_of]
        """Their order over all pairs of a reader."""
        self.in_hand: list[set[_Message]] = [set() for _ in self.stage_of]
        """Messages that were read before they are used."""
        self.reads_early = [self.last_chunk > 0 or self._reads_targets_early(stage) for stage in self.stage_of]
        self.weights_due: list[deque[int]] = [deque() for _ in self.stage_of]
        self.used: dict[int, int] = defaultdict(int)  # slots of a pair: unread, and promised to a compute
        self.steps: list[list[Step]] = [[] for _ in self.stage_of]
        self.awake: list[int] = []  # idle replicas that may have something to do now, as a heap of -position
        self.ends: list[int] = []  # times at which computes end, as a heap
        self.ending: dict[int, list[tuple[int, Op, int]]] = {}  # of each such time: (replica, op, slice)
        self.now = 0
        self.end = 0  # before which the run can't end

    def run(self) -> int | None:
        """None when done; else a time after the limit before which it would not have been."""
        for number, route in enumerate(self.routes):
            if self.chunk_of[number] == 0:
                self._offer(self.activations, route[0], route[0], number)
        self.awake = [-replica for replica, stage in reversed(list(enumerate(self.stage_of))) if stage == 0]
        while True:
            while self.awake:  # later stages first: what they read frees slots for earlier ones
                replica = -heappop(self.awake)
                if not self.is_busy[replica]:
                    self._start(replica)
            if self.end > self.limit:
                return self.end
            if not self.ends:
                assert not any(self.forwards_left), "the simulation stopped early"
                return None
            self.now = heappop(self.ends)
            for replica, op, number in self.ending.pop(self.now):
                self._finish(replica, op, number)

    def _start(self, replica: int) -> None:
        """Starts what the rule prefers of what can be started, if anything can."""
        if self.reads_early[replica]:
            self._read_from_full_pairs(replica)
        done = self.backward_first and self._start_backward(replica)
        done = done or self._start_forward(replica)
        done = done or not self.backward_first and self._start_backward(replica)
        if not done and self.weights_due[replica]:
            number = self.weights_due[replica].popleft()
            self._compute(replica, _BACKWARD_WEIGHT, number, self.weight_costs)

    def _start_forward(self, replica: int) -> bool:
        if not (self.room[replica] and self.free[replica]):
            return False
        number = lane = -1
        lanes = self.activations[replica]
        for key, queue in lanes.items():
            if queue and (number < 0 or queue[0] < number) and self._fits(replica, queue[0]):
                number, lane = queue[0], key
        if number < 0 or self.turns and not self._is_its_turn(replica, number):
            return False
        route, stage = self.routes[number], self.stage_of[replica]
        is_last_chunk = self.chunk_of[number] == self.last_chunk
        self._take(lanes, lane)
        if is_last_chunk and stage == self.last and self.last:
            self._read(replica, route[0], _READ_TARGETS, number)
        if stage or self.chunk_of[number]:
            self._read(replica, route[stage - 1], _READ_ACTIVATION, number)
        if is_last_chunk and stage == 0 and self.last:
            self._fill_slot(replica, route[-1])
            self._deliver(replica, route[-1], _READ_TARGETS, number)
        if not (is_last_chunk and stage == self.last):
            self._fill_slot(replica, route[(stage + 1) % self.num_stages])
        self.forwards_left[replica] -= 1
        self.forwards_begun[replica] += 1
        self.room[replica] -= 1
        self.free[replica] -= 1
        self._compute(replica, _FORWARD, number, self.forward_costs)
        return True

    def _start_backward(self, replica: int) -> bool:
        if self.forwards_left[replica] and (not self.early_backwards or self.in_order and self.room[replica]):
            return False
        number = lane = -1
        order, lanes = self.backward_order, self.gradients[replica]
        for key, queue in lanes.items():
            if queue and (number < 0 or order[queue[0]] < order[number]) and self._fits_back(replica, queue[0]):
                number, lane = queue[0], key
        if number < 0 or self.in_order and order[number] != self.backwards_begun[replica]:
            return False
        self.backwards_begun[replica] += 1
        stage = self.stage_of[replica]
        self._take(lanes, lane)
        if stage < self.last or self.chunk_of[number] < self.last_chunk:
            self._read(replica, self.routes[number][(stage + 1) % self.num_stages], _READ_GRADIENT, number)
        if stage or self.chunk_of[number]:
            self._fill_slot(replica, self.routes[number][stage - 1])
        self._compute(replica, self.backward_op, number, self.backward_costs)
        return True

    def _is_its_turn(self, replica: int, number: int) -> bool:
        """With chunks there must be room for all that comes before it too; on a straight grid nothing is skipped."""
        skipped = self.turns[self.stage_of[replica]][number] - self.forwards_begun[replica]
        return skipped == 0 if self.in_order else skipped < min(self.room[replica], self.free[replica])

    def _fits(self, replica: int, number: int) -> bool:
        """Whether the slots for a forward's messages are free."""
        route, stage, used = self.routes[number], self.stage_of[replica], self.used
        is_last_chunk, pair = self.chunk_of[number] == self.last_chunk, replica * self.num_replicas
        if stage == self.last and is_last_chunk:
            return True
        sends_targets = stage == 0 and is_last_chunk
        if sends_targets and self.last == 1:  # targets and activation share the pair; one slot serves them in turn
            return used[pair + route[1]] + 2 <= max(self.slots, 2)
        if sends_targets and used[pair + route[-1]] >= self.slots:
            return False
        return used[pair + route[(stage + 1) % self.num_stages]] < self.slots

    def _fits_back(self, replica: int, number: int) -> bool:
        stage = self.stage_of[replica]
        if stage == 0 and self.chunk_of[number] == 0:
            return True
        return self.used[replica * self.num_replicas + self.routes[number][stage - 1]] < self.slots

    def _compute(self, replica: int, op: Op, number: int, costs: tuple[int, ...]) -> None:
        cost = costs[self.chunk_of[number] * self.num_stages + self.stage_of[replica]]
        now, end = self.now, self.now + cost
        self.is_busy[replica] = True
        self.steps[replica].append((op, number, now))
        if now + self.left[replica] > self.end:
            self.end = now + self.left[replica]
        self.left[replica] -= cost
        if end in self.ending:
            self.ending[end].append((replica, op, number))
        else:
            self.ending[end] = [(replica, op, number)]
            heappush(self.ends, end)

    def _finish(self, replica: int, op: Op, number: int) -> None:
        """Delivers the result: the slot was promised at the start."""
        stage, route = self.stage_of[replica], self.routes[number]
        self.is_busy[replica] = False
        heappush(self.awake, -replica)
        if not self.trains and self.chunk_of[number] == self.last_chunk:  # nothing is held for a backward
            self.room[replica] += self.last_chunk + 1
            self.free[replica] += self.last_chunk + 1
        if op is _BACKWARD_WEIGHT:
            self.free[replica] += 1
        elif op is not _FORWARD:
            self.room[replica] += 1
            if self.splits:
                self.weights_due[replica].append(number)
            else:
                self.free[replica] += 1
            reader = route[stage - 1]
            number = number if stage else self.previous_chunk[number]
            if number >= 0:
                self._offer(self.gradients, reader, replica, number)
                self._deliver(replica, reader, _READ_GRADIENT, number)
        elif stage < self.last or self.next_chunk[number] >= 0:
            reader = route[(stage + 1) % self.num_stages]
            number = number if stage < self.last else self.next_chunk[number]
            self._offer(self.activations, reader, replica, number)
            self._deliver(replica, reader, _READ_ACTIVATION, number)
        elif self.trains:
            self._offer(self.gradients, replica, replica, number)

    def _offer(self, lanes: list[_Lanes], replica: int, source: int, number: int) -> None:
        """Something that `replica` may compute, which comes from `source`."""
        lanes[replica][number if self.last_chunk else source].append(number)

    def _take(self, lanes: _Lanes, lane: int) -> None:
        lanes[lane].popleft()
        if self.last_chunk:
            del lanes[lane]

    # --- messages -------------------------------------------------------------------------------------------------

    def _wake(self, replica: int) -> None:
        if not self.is_busy[replica]:
            heappush(self.awake, -replica)

    def _fill_slot(self, source: int, reader: int) -> None:
        self.used[source * self.num_replicas + reader] += 1

    def _deliver(self, source: int, reader: int, op: Op, number: int) -> None:
        if self.last_chunk or op is _READ_TARGETS:  # else lanes say it all: a pair's oldest message is used first
            self.unread[reader][source].append((op, number))
            self.arrivals[reader][op, number] = len(self.arrivals[reader])
        self._wake(reader)

    def _read(self, replica: int, source: int, op: Op, number: int) -> None:
        """Reads what is used now, unless it is in hand; what is older on its pair is read before it, and kept."""
        if self.last_chunk or op is _READ_TARGETS:
            message = (op, number)
            if message in self.in_hand[replica]:
                self.in_hand[replica].remove(message)
                return
            while self.unread[replica][source][0] != message:
                self._read_early(replica, source)
            self.unread[replica][source].popleft()
        self.used[source * self.num_replicas + replica] -= 1
        self._wake(source)

    def _read_early(self, replica: int, source: int) -> None:
        """Reads the oldest message of a pair before it is used."""
        message = self.unread[replica][source].popleft()
        self.in_hand[replica].add(message)
        self.steps[replica].append((*message, self.now))
        self.used[source * self.num_replicas + replica] -= 1
        self._wake(source)

    def _reads_targets_early(self, stage: int) -> bool:
        """With two stages they share the pair with the activations: only one slot asks for it; they have it alone."""
        return stage == self.last > 0 and (self.last > 1 or self.slots == 1)

    def _read_from_full_pairs(self, replica: int) -> None:
        """Frees a slot of each full pair: with chunks of any, else of those that hold targets.

        In the order in which the messages came, because later ones may come from who waits for the slot of an earlier.
        """
        queues, arrivals = self.unread[replica], self.arrivals[replica]
        while full := [
            s for s, queue in queues.items() if queue and self.used[s * self.num_replicas + replica] >= self.full
        ]:
            self._read_early(replica, min(full, key=lambda source: arrivals[queues[source][0]]))
