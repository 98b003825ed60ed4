"""The event-driven simulation of one component, with integer stage costs: what each replica computes, and when.

Whenever a replica is idle it chooses among the micro-batches that have reached it, the oldest message of each ordered
pair, the lowest micro-batch first. The rule says which kind of work comes first and how many micro-batches it may hold:

    gpipe       every forward before the first backward                                        (GPipe, Huang et al.)
    1f1b        a forward while fewer than P - stage + extra_in_flight micro-batches are forwarded but not yet
                backwarded, else a backward                            (PipeDream-flush, Narayanan et al. 2021)
    zb-h1       1f1b with a split backward, below          (Qi et al. 2023, "Zero bubble pipeline parallelism", 2.1)
    forward     no backward: evaluation

A forward comes first because it is what later stages wait for; on a straight grid nothing is ever there to choose from.

With a split backward, T_B for the inputs and T_W for the weights, the weights' half runs when nothing else can, and no
replica holds more than P + extra_in_flight micro-batches from their forward to the end of that half: no more than
1f1b's first stage holds anyway. On a straight grid of equal costs that is ZB-H1, whose bubble is
(P - 1)(T_F + T_B - T_W) where 1f1b's is (P - 1)(T_F + T_B + T_W): the paper's table 2. With extra_in_flight a backward
comes before a forward, because there is then room to be generous: pp4 x dp4 with one replica lost takes 34 units
instead of 36.

Why the lists can't deadlock: a replica starts a compute only when the slot for its result is free, so that in the
simulated run no send ever waits; lists with one run that ends have no run that doesn't. The simulation itself always
goes on, by induction over the stages: there are finitely many forwards, so the first stage always comes to read a
gradient, so the second can always send one, and so on to the last, so backwards never stop; the halves for the weights
need no message and send none, so they never stop either; so the caps always free up, so forwards never stop. (With two
stages and one slot targets and activation share it: the activation is promised the slot that its targets leave at the
last stage's next pause, which depends on nobody.)

Messages of an ordered pair are read in the order sent, because only the oldest unread one of a pair may be chosen.
Targets are read with the forward that needs them, or earlier when their pair has no free slot (the first stage runs up
to P micro-batches ahead of the last one; with 3 slots it would wait for it).

A run that is only wanted if it ends by some time is given up as soon as one replica can't be ready by then: its work
that is left, and behind its last message the backwards of all stages before it, take too long.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from parallel3d.pipeline.instructions import Op
from parallel3d.pipeline.request import PlanRequest, Routes

_FORWARD, _READ_TARGETS = Op.FORWARD, Op.RECV_TARGETS
_BACKWARD, _BACKWARD_INPUT, _BACKWARD_WEIGHT = Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # a look-up less


Step = tuple[Op, int, int]
"""(op, micro-batch, start): a compute of the simulated run, or targets read before the forward that needs them."""


class Run(NamedTuple):
    """How one component runs; replicas and micro-batches are positions."""

    steps: list[list[Step]]
    """Of each replica, in order."""
    makespan: int


def simulate(request: PlanRequest, shape: Routes, limit: int | None = None) -> Run | int:
    """The run of one component, or, when it would end after `limit`, a time before which it can't end."""
    simulation = _Simulation(request, shape, float("inf") if limit is None else limit)
    late = simulation.run()
    return Run(simulation.steps, simulation.now) if late is None else late


def least_makespan(request: PlanRequest, loads: Iterable[tuple[int, int]]) -> int:
    """No run with these (stage, micro-batches of one of its replicas) can be shorter."""
    heads = list(accumulate(request.costs.forward, initial=0))
    tails, work = _tails(request), request.costs.total if request.trains else request.costs.forward
    return max(heads[stage] + num_micro_batches * work[stage] + tails[stage] for stage, num_micro_batches in loads)


def _tails(request: PlanRequest) -> list[int]:
    """What must at least follow after a stage has done all of its work."""
    costs = request.costs
    if not request.trains:
        return [sum(costs.forward[stage + 1 :]) for stage in range(request.num_stages)]
    if request.splits:  # the halves for the weights may all come after the last message
        return [0] * request.num_stages
    return [sum(costs.backward[:stage]) for stage in range(request.num_stages)]


class _Simulation:
    """Runs one component to its end, or until it is late.

    A queue holds the unread messages of one ordered pair, oldest first, as micro-batches. The first stage finds its own
    micro-batches in a queue from itself, and so does the last stage for the gradients that its forwards make.
    """

    def __init__(self, request: PlanRequest, shape: Routes, limit: float):
        costs, num_stages = request.costs, request.num_stages
        self.routes = shape
        self.last = num_stages - 1
        self.slots = request.slots
        self.limit = limit
        self.trains, self.splits = request.trains, request.splits
        self.early_backwards = request.rule != "gpipe"
        self.backward_first = request.splits and request.limits_in_flight and request.extra_in_flight > 0
        self.backward_op = _BACKWARD_INPUT if request.splits else _BACKWARD
        self.forward_costs, self.weight_costs = costs.forward, costs.backward_weight
        self.backward_costs = costs.backward_input if request.splits else costs.backward
        self.stage_of = [stage for _, stage in sorted({(r, stage) for route in shape for stage, r in enumerate(route)})]
        self.num_replicas = len(self.stage_of)
        self.forwards_left = [0] * self.num_replicas
        for route in shape:
            for replica in route:
                self.forwards_left[replica] += 1
        tails, work = _tails(request), costs.total if request.trains else costs.forward
        self.left = [n * work[stage] + tails[stage] for n, stage in zip(self.forwards_left, self.stage_of)]
        """Time that must at least pass from now on, once a replica is not idle any more."""
        capped, extra = request.limits_in_flight, request.extra_in_flight
        self.room = [num_stages - stage + extra if capped else len(shape) for stage in self.stage_of]
        """Forwards that may still be started before a backward must end."""
        self.free = [num_stages + extra if capped and request.splits else len(shape)] * self.num_replicas
        """Forwards that may still be started before the weight's half of a backward must end."""
        self.is_busy = [False] * self.num_replicas
        self.activations: list[dict[int, deque[int]]] = [defaultdict(deque) for _ in self.stage_of]
        self.gradients: list[dict[int, deque[int]]] = [defaultdict(deque) for _ in self.stage_of]
        self.targets: list[dict[int, deque[int]]] = [defaultdict(deque) for _ in self.stage_of]
        self.has_targets = [False] * len(shape)
        self.weights_due: list[deque[int]] = [deque() for _ in self.stage_of]
        self.used: dict[int, int] = defaultdict(int)  # slots of a pair: unread, and promised to a compute
        self.steps: list[list[Step]] = [[] for _ in self.stage_of]
        self.awake: list[int] = []  # idle replicas that may have something to do now, as a heap of -position
        self.ends: list[int] = []  # times at which computes end, as a heap
        self.ending: dict[int, list[tuple[int, Op, int]]] = {}  # of each such time: (replica, op, micro-batch)
        self.now = 0
        self.end = 0  # before which the run can't end

    def run(self) -> int | None:
        """None when done; else a time after the limit before which it would not have been."""
        for micro_batch, route in enumerate(self.routes):
            self.activations[route[0]][route[0]].append(micro_batch)
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
            for replica, op, micro_batch in self.ending.pop(self.now):
                self._finish(replica, op, micro_batch)

    def _start(self, replica: int) -> None:
        """Starts what the rule prefers of what can be started, if anything can."""
        if self.targets[replica]:
            self._read_targets_of_full_pairs(replica)
        done = self.backward_first and self._start_backward(replica)
        done = done or self._start_forward(replica)
        done = done or not self.backward_first and self._start_backward(replica)
        if not done and self.weights_due[replica]:
            stage = self.stage_of[replica]
            self._compute(replica, _BACKWARD_WEIGHT, self.weights_due[replica].popleft(), self.weight_costs[stage])

    def _start_forward(self, replica: int) -> bool:
        if not (self.room[replica] and self.free[replica]):
            return False
        micro_batch = source = -1
        for peer, queue in self.activations[replica].items():
            if queue and (micro_batch < 0 or queue[0] < micro_batch) and self._fits(replica, queue[0]):
                micro_batch, source = queue[0], peer
        if micro_batch < 0:
            return False
        route, stage = self.routes[micro_batch], self.stage_of[replica]
        self.activations[replica][source].popleft()
        if stage == 0:
            if self.last:
                self._fill_slot(replica, route[-1])
                self.targets[route[-1]][replica].append(micro_batch)
                self._wake(route[-1])
        else:
            while stage == self.last and not self.has_targets[micro_batch]:
                self._read_targets(replica, route[0], micro_batch)
            self._free_slot(source, replica)
        if stage < self.last:
            self._fill_slot(replica, route[stage + 1])
        self.forwards_left[replica] -= 1
        self.room[replica] -= 1
        self.free[replica] -= 1
        self._compute(replica, _FORWARD, micro_batch, self.forward_costs[stage])
        return True

    def _start_backward(self, replica: int) -> bool:
        if not self.early_backwards and self.forwards_left[replica]:
            return False
        micro_batch = source = -1
        for peer, queue in self.gradients[replica].items():
            if queue and (micro_batch < 0 or queue[0] < micro_batch) and self._fits_back(replica, queue[0]):
                micro_batch, source = queue[0], peer
        if micro_batch < 0:
            return False
        stage = self.stage_of[replica]
        self.gradients[replica][source].popleft()
        if stage < self.last:
            self._free_slot(source, replica)
        if stage:
            self._fill_slot(replica, self.routes[micro_batch][stage - 1])
        self._compute(replica, self.backward_op, micro_batch, self.backward_costs[stage])
        return True

    def _fits(self, replica: int, micro_batch: int) -> bool:
        """Whether the slots for a forward's messages are free."""
        route, stage = self.routes[micro_batch], self.stage_of[replica]
        if stage == self.last:
            return True
        used, pair = self.used, replica * self.num_replicas
        if stage == 0 and self.last == 1:  # targets and activation share the pair; one slot serves them in turn
            return used[pair + route[1]] + 2 <= max(self.slots, 2)
        if stage == 0 and used[pair + route[-1]] >= self.slots:
            return False
        return used[pair + route[stage + 1]] < self.slots

    def _fits_back(self, replica: int, micro_batch: int) -> bool:
        stage = self.stage_of[replica]
        return stage == 0 or self.used[replica * self.num_replicas + self.routes[micro_batch][stage - 1]] < self.slots

    def _compute(self, replica: int, op: Op, micro_batch: int, cost: int) -> None:
        now, end = self.now, self.now + cost
        self.is_busy[replica] = True
        self.steps[replica].append((op, micro_batch, now))
        if now + self.left[replica] > self.end:
            self.end = now + self.left[replica]
        self.left[replica] -= cost
        if end in self.ending:
            self.ending[end].append((replica, op, micro_batch))
        else:
            self.ending[end] = [(replica, op, micro_batch)]
            heappush(self.ends, end)

    def _finish(self, replica: int, op: Op, micro_batch: int) -> None:
        """Delivers the result: the slot was promised at the start."""
        stage, route = self.stage_of[replica], self.routes[micro_batch]
        self.is_busy[replica] = False
        heappush(self.awake, -replica)
        if op is _BACKWARD_WEIGHT:
            self.free[replica] += 1
        elif op is not _FORWARD:
            self.room[replica] += 1
            if self.splits:
                self.weights_due[replica].append(micro_batch)
            else:
                self.free[replica] += 1
            if stage:
                self.gradients[route[stage - 1]][replica].append(micro_batch)
                self._wake(route[stage - 1])
        elif stage < self.last:
            self.activations[route[stage + 1]][replica].append(micro_batch)
            self._wake(route[stage + 1])
        elif self.trains:
            self.gradients[replica][replica].append(micro_batch)

    def _wake(self, replica: int) -> None:
        if not self.is_busy[replica]:
            heappush(self.awake, -replica)

    def _fill_slot(self, source: int, reader: int) -> None:
        self.used[source * self.num_replicas + reader] += 1

    def _free_slot(self, source: int, reader: int) -> None:
        self.used[source * self.num_replicas + reader] -= 1
        self._wake(source)

    def _read_targets(self, replica: int, source: int, needed: int = -1) -> None:
        """Reads the oldest targets of a pair; those that are needed now are read with their forward."""
        micro_batch = self.targets[replica][source].popleft()
        self.has_targets[micro_batch] = True
        if micro_batch != needed:
            self.steps[replica].append((_READ_TARGETS, micro_batch, self.now))
        self._free_slot(source, replica)

    def _read_targets_of_full_pairs(self, replica: int) -> None:
        """Frees a slot of each full pair that holds targets.

        With two stages they share the pair with the activations: only one slot asks for it, and then they are alone.
        """
        if self.last == 1 and self.slots > 1:
            return
        for source, queue in self.targets[replica].items():
            if queue and self.used[source * self.num_replicas + replica] >= self.slots:
                self._read_targets(replica, source)
