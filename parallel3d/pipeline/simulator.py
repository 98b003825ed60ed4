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
_ReadyQueues = dict[int, deque[int]]

VirtualMicroBatch = tuple[int, int]
"""(micro-batch, chunk)"""
SimulatedStep = tuple[Op, int, int]
"""(op, number of a slice, start): a compute of the simulated run, or a message read before what needs it."""


class SimulatedRun(NamedTuple):
    """How one component runs; replicas and micro-batches are positions."""

    virtual_micro_batches: list[VirtualMicroBatch]
    """By number, which is the order of forwards; without chunks they are the micro-batches."""
    steps: list[list[SimulatedStep]]
    """Of each replica, in order."""
    makespan: int


def simulate(request: PlanRequest, shape: Routes, limit: int | None = None) -> SimulatedRun | int:
    """The run of one component, or, when it would end after `limit`, a time before which it can't end."""
    simulation = _Simulation(request, shape, float("inf") if limit is None else limit)
    late = simulation.run()
    return SimulatedRun(simulation.virtual_micro_batches, simulation.steps, simulation.now) if late is None else late


def least_makespan(request: PlanRequest, loads: Iterable[tuple[int, int]]) -> int:
    """No run with these (stage, micro-batches of one of its replicas) can be shorter."""
    min_time_before = list(accumulate(request.costs.forward, initial=0))
    min_time_after, compute_time = _min_time_after(request), request.compute_time
    return max(
        min_time_before[stage] + num_micro_batches * compute_time[stage] + min_time_after[stage]
        for stage, num_micro_batches in loads
    )


def _min_time_after(request: PlanRequest) -> list[int]:
    """What must at least follow after a stage has done all of its work: it does the first chunk's backward last."""
    costs = request.costs
    if not request.has_backward:
        last_chunk = costs.forward[-request.num_stages :]
        return [sum(last_chunk[stage + 1 :]) for stage in range(request.num_stages)]
    if request.splits:  # the halves for the weights may all come after the last message
        return [0] * request.num_stages
    return [sum(costs.backward[:stage]) for stage in range(request.num_stages)]


def _order_virtual_micro_batches(request: PlanRequest, shape: Routes) -> tuple[list[VirtualMicroBatch], list[int]]:
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
    position = {virtual_micro_batch: number for number, virtual_micro_batch in enumerate(backwards)}
    return forwards, [position[virtual_micro_batch] for virtual_micro_batch in forwards]


def _count_forwards_before(routes: list[tuple[int, ...]]) -> list[list[int]]:
    """By stage and slice: the place among the slices of its replica."""
    counts: Counter[int] = Counter()
    num_forwards_before: list[list[int]] = [[] for _ in routes[0]]
    for route in routes:
        for positions, replica in zip(num_forwards_before, route):
            positions.append(counts[replica])
            counts[replica] += 1
    return num_forwards_before


def _group_size(request: PlanRequest, shape: Routes) -> int:
    return request.num_stages * max(len(set(column)) for column in zip(*shape))


def _in_flight_budgets(request: PlanRequest, shape: Routes, stage_of: list[int]) -> list[int]:
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
        self.virtual_micro_batches, self.backward_order = _order_virtual_micro_batches(request, shape)
        self.routes = [shape[micro_batch] for micro_batch, _ in self.virtual_micro_batches]
        self.chunk_of = [chunk for _, chunk in self.virtual_micro_batches]
        number_of = {
            virtual_micro_batch: number for number, virtual_micro_batch in enumerate(self.virtual_micro_batches)
        }
        self.next_chunk = [
            number_of.get((micro_batch, chunk + 1), -1) for micro_batch, chunk in self.virtual_micro_batches
        ]
        self.previous_chunk = [
            number_of.get((micro_batch, chunk - 1), -1) for micro_batch, chunk in self.virtual_micro_batches
        ]
        self.num_stages, self.last_stage = num_stages, num_stages - 1
        self.last_chunk = request.virtual_stages - 1
        self.slots = request.slots
        takes_two = self.last_chunk and self.last_stage == 1  # a forward's targets and activation go into one pair
        self.early_read_at = max(1, self.slots - 1) if takes_two else self.slots
        """With so many slots of a pair taken its reader reads early."""
        self.limit = limit
        self.has_backward, self.splits = request.has_backward, request.splits
        self.early_backwards = request.schedule != "gpipe"
        self.backward_first = request.splits and request.limits_in_flight and request.extra_in_flight > 0
        self.backward_op = _BACKWARD_INPUT if request.splits else _BACKWARD
        self.forward_costs, self.weight_costs = costs.forward, costs.backward_weight
        self.backward_costs = costs.backward_input if request.splits else costs.backward
        self.stage_of = [stage for _, stage in sorted({(r, stage) for route in shape for stage, r in enumerate(route)})]
        self.num_replicas = len(self.stage_of)
        counts = Counter(replica for route in shape for replica in route)
        self.forwards_left = [counts[replica] * request.virtual_stages for replica in range(self.num_replicas)]
        min_time_after, compute_time = _min_time_after(request), request.compute_time
        self.time_left = [
            counts[replica] * compute_time[stage] + min_time_after[stage] for replica, stage in enumerate(self.stage_of)
        ]
        """Time that must at least pass from now on, once a replica is not idle any more."""
        self.in_flight_budget = _in_flight_budgets(request, shape, self.stage_of)
        """Forwards that may still be started before a backward must end."""
        held_by_first = max(self.in_flight_budget) if request.limits_in_flight else len(self.virtual_micro_batches)
        self.weight_grad_budget = [
            held_by_first if request.splits else len(self.virtual_micro_batches)
        ] * self.num_replicas
        """Forwards that may still be started before the weight's half of a backward must end."""
        self.in_order = self.last_chunk > 0 and len(set(shape)) == 1 and len(shape) % num_stages == 0
        """Whether each replica waits for what comes next by the paper's order, whatever else could be done."""
        self.num_forwards_before = _count_forwards_before(self.routes) if self.last_chunk else []
        """Of each slice at each stage: how many forwards of its replica come before it."""
        self.forwards_begun = [0] * self.num_replicas
        self.backwards_begun = [0] * self.num_replicas
        self.is_busy = [False] * self.num_replicas
        self.activations: list[_ReadyQueues] = [defaultdict(deque) for _ in self.stage_of]
        self.gradients: list[_ReadyQueues] = [defaultdict(deque) for _ in self.stage_of]
        self.unread: list[dict[int, deque[_Message]]] = [defaultdict(deque) for _ in self.stage_of]
        self.arrivals: list[dict[_Message, int]] = [{} for _ in self.stage_of]
        """Their order over all pairs of a reader."""
        self.read_unused: list[set[_Message]] = [set() for _ in self.stage_of]
        """Messages that were read before they are used."""
        self.reads_early = [self.last_chunk > 0 or self._reads_targets_early(stage) for stage in self.stage_of]
        self.weights_due: list[deque[int]] = [deque() for _ in self.stage_of]
        self.slots_used: dict[int, int] = defaultdict(int)  # slots of a pair: unread, and promised to a compute
        self.steps: list[list[SimulatedStep]] = [[] for _ in self.stage_of]
        self.runnable: list[int] = []  # idle replicas that may have something to do now, as a heap of -position
        self.end_times: list[int] = []  # times at which computes end, as a heap
        self.ending_at: dict[int, list[tuple[int, Op, int]]] = {}  # of each such time: (replica, op, slice)
        self.now = 0
        self.end = 0  # before which the run can't end

    def run(self) -> int | None:
        """None when done; else a time after the limit before which it would not have been."""
        for number, route in enumerate(self.routes):
            if self.chunk_of[number] == 0:
                self._enqueue(self.activations, route[0], route[0], number)
        self.runnable = [-replica for replica, stage in reversed(list(enumerate(self.stage_of))) if stage == 0]
        while True:
            while self.runnable:  # later stages first: what they read frees slots for earlier ones
                replica = -heappop(self.runnable)
                if not self.is_busy[replica]:
                    self._start(replica)
            if self.end > self.limit:
                return self.end
            if not self.end_times:
                assert not any(self.forwards_left), "the simulation stopped early"
                return None
            self.now = heappop(self.end_times)
            for replica, op, number in self.ending_at.pop(self.now):
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
        if not (self.in_flight_budget[replica] and self.weight_grad_budget[replica]):
            return False
        number = queue_key = -1
        ready_queues = self.activations[replica]
        for key, queue in ready_queues.items():
            if queue and (number < 0 or queue[0] < number) and self._has_slots_for_forward(replica, queue[0]):
                number, queue_key = queue[0], key
        if number < 0 or self.num_forwards_before and not self._may_run_now(replica, number):
            return False
        route, stage = self.routes[number], self.stage_of[replica]
        is_last_chunk = self.chunk_of[number] == self.last_chunk
        self._dequeue(ready_queues, queue_key)
        if is_last_chunk and stage == self.last_stage and self.last_stage:
            self._read(replica, route[0], _READ_TARGETS, number)
        if stage or self.chunk_of[number]:
            self._read(replica, route[stage - 1], _READ_ACTIVATION, number)
        if is_last_chunk and stage == 0 and self.last_stage:
            self._fill_slot(replica, route[-1])
            self._deliver(replica, route[-1], _READ_TARGETS, number)
        if not (is_last_chunk and stage == self.last_stage):
            self._fill_slot(replica, route[(stage + 1) % self.num_stages])
        self.forwards_left[replica] -= 1
        self.forwards_begun[replica] += 1
        self.in_flight_budget[replica] -= 1
        self.weight_grad_budget[replica] -= 1
        self._compute(replica, _FORWARD, number, self.forward_costs)
        return True

    def _start_backward(self, replica: int) -> bool:
        if self.forwards_left[replica] and (
            not self.early_backwards or self.in_order and self.in_flight_budget[replica]
        ):
            return False
        number = queue_key = -1
        order, ready_queues = self.backward_order, self.gradients[replica]
        for key, queue in ready_queues.items():
            if (
                queue
                and (number < 0 or order[queue[0]] < order[number])
                and self._has_slot_for_backward(replica, queue[0])
            ):
                number, queue_key = queue[0], key
        if number < 0 or self.in_order and order[number] != self.backwards_begun[replica]:
            return False
        self.backwards_begun[replica] += 1
        stage = self.stage_of[replica]
        self._dequeue(ready_queues, queue_key)
        if stage < self.last_stage or self.chunk_of[number] < self.last_chunk:
            self._read(replica, self.routes[number][(stage + 1) % self.num_stages], _READ_GRADIENT, number)
        if stage or self.chunk_of[number]:
            self._fill_slot(replica, self.routes[number][stage - 1])
        self._compute(replica, self.backward_op, number, self.backward_costs)
        return True

    def _may_run_now(self, replica: int, number: int) -> bool:
        """With chunks there must be room for all that comes before it too; on a straight grid nothing is skipped."""
        skipped = self.num_forwards_before[self.stage_of[replica]][number] - self.forwards_begun[replica]
        return (
            skipped == 0
            if self.in_order
            else skipped < min(self.in_flight_budget[replica], self.weight_grad_budget[replica])
        )

    def _has_slots_for_forward(self, replica: int, number: int) -> bool:
        """Whether the slots for a forward's messages are free."""
        route, stage, slots_used = self.routes[number], self.stage_of[replica], self.slots_used
        is_last_chunk, pair = self.chunk_of[number] == self.last_chunk, replica * self.num_replicas
        if stage == self.last_stage and is_last_chunk:
            return True
        sends_targets = stage == 0 and is_last_chunk
        if (
            sends_targets and self.last_stage == 1
        ):  # targets and activation share the pair; one slot serves them in turn
            return slots_used[pair + route[1]] + 2 <= max(self.slots, 2)
        if sends_targets and slots_used[pair + route[-1]] >= self.slots:
            return False
        return slots_used[pair + route[(stage + 1) % self.num_stages]] < self.slots

    def _has_slot_for_backward(self, replica: int, number: int) -> bool:
        stage = self.stage_of[replica]
        if stage == 0 and self.chunk_of[number] == 0:
            return True
        return self.slots_used[replica * self.num_replicas + self.routes[number][stage - 1]] < self.slots

    def _compute(self, replica: int, op: Op, number: int, costs: tuple[int, ...]) -> None:
        cost = costs[self.chunk_of[number] * self.num_stages + self.stage_of[replica]]
        now, end = self.now, self.now + cost
        self.is_busy[replica] = True
        self.steps[replica].append((op, number, now))
        if now + self.time_left[replica] > self.end:
            self.end = now + self.time_left[replica]
        self.time_left[replica] -= cost
        if end in self.ending_at:
            self.ending_at[end].append((replica, op, number))
        else:
            self.ending_at[end] = [(replica, op, number)]
            heappush(self.end_times, end)

    def _finish(self, replica: int, op: Op, number: int) -> None:
        """Delivers the result: the slot was promised at the start."""
        stage, route = self.stage_of[replica], self.routes[number]
        self.is_busy[replica] = False
        heappush(self.runnable, -replica)
        if not self.has_backward and self.chunk_of[number] == self.last_chunk:  # nothing is held for a backward
            self.in_flight_budget[replica] += self.last_chunk + 1
            self.weight_grad_budget[replica] += self.last_chunk + 1
        if op is _BACKWARD_WEIGHT:
            self.weight_grad_budget[replica] += 1
        elif op is not _FORWARD:
            self.in_flight_budget[replica] += 1
            if self.splits:
                self.weights_due[replica].append(number)
            else:
                self.weight_grad_budget[replica] += 1
            reader = route[stage - 1]
            number = number if stage else self.previous_chunk[number]
            if number >= 0:
                self._enqueue(self.gradients, reader, replica, number)
                self._deliver(replica, reader, _READ_GRADIENT, number)
        elif stage < self.last_stage or self.next_chunk[number] >= 0:
            reader = route[(stage + 1) % self.num_stages]
            number = number if stage < self.last_stage else self.next_chunk[number]
            self._enqueue(self.activations, reader, replica, number)
            self._deliver(replica, reader, _READ_ACTIVATION, number)
        elif self.has_backward:
            self._enqueue(self.gradients, replica, replica, number)

    def _enqueue(self, ready_queues: list[_ReadyQueues], replica: int, source: int, number: int) -> None:
        """Something that `replica` may compute, which comes from `source`."""
        ready_queues[replica][number if self.last_chunk else source].append(number)

    def _dequeue(self, ready_queues: _ReadyQueues, queue_key: int) -> None:
        ready_queues[queue_key].popleft()
        if self.last_chunk:
            del ready_queues[queue_key]

    # --- messages -------------------------------------------------------------------------------------------------

    def _mark_runnable(self, replica: int) -> None:
        if not self.is_busy[replica]:
            heappush(self.runnable, -replica)

    def _fill_slot(self, source: int, reader: int) -> None:
        self.slots_used[source * self.num_replicas + reader] += 1

    def _deliver(self, source: int, reader: int, op: Op, number: int) -> None:
        if self.last_chunk or op is _READ_TARGETS:  # else lanes say it all: a pair's oldest message is used first
            self.unread[reader][source].append((op, number))
            self.arrivals[reader][op, number] = len(self.arrivals[reader])
        self._mark_runnable(reader)

    def _read(self, replica: int, source: int, op: Op, number: int) -> None:
        """Reads what is used now, unless it is in hand; what is older on its pair is read before it, and kept."""
        if self.last_chunk or op is _READ_TARGETS:
            message = (op, number)
            if message in self.read_unused[replica]:
                self.read_unused[replica].remove(message)
                return
            while self.unread[replica][source][0] != message:
                self._read_early(replica, source)
            self.unread[replica][source].popleft()
        self.slots_used[source * self.num_replicas + replica] -= 1
        self._mark_runnable(source)

    def _read_early(self, replica: int, source: int) -> None:
        """Reads the oldest message of a pair before it is used."""
        message = self.unread[replica][source].popleft()
        self.read_unused[replica].add(message)
        self.steps[replica].append((*message, self.now))
        self.slots_used[source * self.num_replicas + replica] -= 1
        self._mark_runnable(source)

    def _reads_targets_early(self, stage: int) -> bool:
        """With two stages they share the pair with the activations: only one slot asks for it; they have it alone."""
        return stage == self.last_stage > 0 and (self.last_stage > 1 or self.slots == 1)

    def _read_from_full_pairs(self, replica: int) -> None:
        """Frees a slot of each full pair: with chunks of any, else of those that hold targets.

        In the order in which the messages came, because later ones may come from who waits for the slot of an earlier.
        """
        queues, arrivals = self.unread[replica], self.arrivals[replica]
        while full := [
            s
            for s, queue in queues.items()
            if queue and self.slots_used[s * self.num_replicas + replica] >= self.early_read_at
        ]:
            self._read_early(replica, min(full, key=lambda source: arrivals[queues[source][0]]))
