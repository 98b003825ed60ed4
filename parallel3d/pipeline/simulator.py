"""The event-driven simulation of one component, with integer stage costs: what each replica computes, and when.

An idle replica chooses among the micro-batches that have reached it (the oldest message of each ordered pair) the first
in the schedule's order. The schedule (`schedules/`) also decides which kind of work comes first and how many
micro-batches a replica may hold; the products for weights of a split backward run when nothing else can.

Forwards come first because later stages wait for them; on a straight grid there is never a choice.

With chunks of layers the unit is the *virtual micro-batch*, (micro-batch, chunk). A forward then leaves room
for those before it in the schedule's order that have not arrived, so that it can't lock them out.

Why the lists can't deadlock: a replica starts a compute only when the slot for its result is free, so in the simulated
run no send ever waits; and if one run of the lists ends, every run does. The simulation itself always continues, by
induction over the stages. There are finitely many forwards, so the first stage eventually reads a gradient; so the
second can always send one, and so on to the last: backwards never stop. The halves for the weights neither need nor
send a message, so they never stop either. So budgets are always returned, and forwards never stop. (With two stages and
one slot, targets and activation share it: the activation reserves the slot that its targets leave at the last stage's
next pause. There the last stage reads in order of arrival, so that it never waits for a replica that waits for that
slot; in another order one damaged grid in a hundred got stuck.)

With chunks the pairs form a ring. So the reader of a full pair reads, at its next pause, even messages that it does not
need yet: no replica waits longer for a slot. Each schedule with chunks shows in its file that budgets leave room for
the next forward.

Targets are read with the forward that needs them, or earlier if their pair has no free slot (the first stage runs up to
P micro-batches ahead of the last one, and would wait for it with 3 slots).

A run with a time limit stops as soon as one replica can't meet it: its remaining work, and after its last message the
backwards of all stages before it, take too long.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from parallel3d.pipeline.component_tables import ComponentTables, Hop
from parallel3d.pipeline.instructions import Op
from parallel3d.pipeline.mailboxes import Mailboxes
from parallel3d.pipeline.request import Pause, PlanRequest, Routes, no_pause
from parallel3d.pipeline.schedules.schedule import VirtualMicroBatch
from parallel3d.pipeline.time_bounds import min_time_after

_FORWARD = Op.FORWARD  # saves a look-up
_BACKWARD, _BACKWARD_INPUT, _BACKWARD_WEIGHT = Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
_READ_TARGETS, _READ_ACTIVATION, _READ_GRADIENT = Op.RECV_TARGETS, Op.RECV_ACTIVATION, Op.RECV_GRADIENT

_ReadyQueues = dict[int, deque[int]]

SimulatedStep = tuple[Op, int, int]
"""(op, number of a virtual micro-batch, start): a compute, or a message that is read before it is needed."""


class SimulatedRun(NamedTuple):
    """The simulated run of one component; replicas and micro-batches are positions."""

    virtual_micro_batches: list[VirtualMicroBatch]
    """By number."""
    steps: Sequence[list[SimulatedStep]]
    """The steps of each replica, in order."""
    makespan: int


def simulate(
    request: PlanRequest,
    shape: Routes,
    limit: int | None = None,
    pause: Pause = no_pause,
    factors: tuple[int, ...] = (),
) -> SimulatedRun | int:
    """Simulates one component; if it would end after `limit`, returns a time before which it can't end.

    `factors` are those of its replicas (`PlanRequest.time_factors`); () is 1 for all.
    """
    simulation = _Simulation(request, shape, float("inf") if limit is None else limit, factors)
    late = simulation.run(pause)
    if late is not None:
        return late
    return SimulatedRun(simulation.tables.virtual_micro_batches, simulation.steps, simulation.clock.now)


class _Clock:
    """Simulated time, and the computes that end at each later time."""

    def __init__(self) -> None:
        self.now = 0
        self._end_times: list[int] = []  # a heap
        self._ending_at: dict[int, list[tuple[int, Op, int]]] = {}

    def add(self, end: int, replica: int, op: Op, number: int) -> None:
        if end in self._ending_at:
            self._ending_at[end].append((replica, op, number))
        else:
            self._ending_at[end] = [(replica, op, number)]
            heappush(self._end_times, end)

    def advance(self) -> list[tuple[int, Op, int]]:
        """Moves to the next end of a compute; returns the (replica, op, number) that end then, [] if nothing runs."""
        if not self._end_times:
            return []
        self.now = heappop(self._end_times)
        return self._ending_at.pop(self.now)


class _Budgets:
    """Forwards that each replica may still start before a micro-batch that it holds must be finished."""

    def __init__(self, request: PlanRequest, tables: ComponentTables):
        num_all, num_replicas = len(tables.virtual_micro_batches), tables.num_replicas
        rules, component = request.rules, tables.component
        is_limited = request.has_backward or tables.has_chunks  # without either nothing is held
        self.in_flight = rules.in_flight_budgets(component) if is_limited else [num_all] * num_replicas
        """Forwards left before a backward must end."""
        self.deferred = rules.deferred_budgets(component) if request.splits else [num_all] * num_replicas
        """Forwards left before the weights' half of a split backward must end."""

    def take(self, replica: int) -> None:
        self.in_flight[replica] -= 1
        self.deferred[replica] -= 1

    def left(self, replica: int) -> int:
        return min(self.in_flight[replica], self.deferred[replica])

    def give_back(self, replica: int, count: int) -> None:
        self.in_flight[replica] += count
        self.deferred[replica] += count


class _Simulation:
    """Simulates one component to its end, or until it is late.

    A ready queue holds the virtual micro-batches that a replica may compute next, oldest first: those that arrived over
    one ordered pair, the first stage's own micro-batches, or the last stage's own gradients. With chunks every virtual
    micro-batch has its own queue.
    """

    def __init__(self, request: PlanRequest, shape: Routes, limit: float, factors: tuple[int, ...]):
        self.tables = tables = ComponentTables(request, shape)
        self.factors = factors or (1,) * tables.num_replicas
        self.limit, self.clock, self.budgets = limit, _Clock(), _Budgets(request, tables)
        self.has_backward, self.splits = request.has_backward, request.splits
        rules = request.rules
        self.backwards_wait, self.weights_follow = rules.backwards_wait, rules.weights_follow
        self.keeps_order = rules.keeps_order(tables.component)
        self.fills_budget = self.keeps_order and rules.fills_budget
        self.backward_first = self.has_backward and rules.prefers_backward(tables.component)
        self._set_costs(request, shape)
        replicas = range(tables.num_replicas)
        self.forwards_started = [0 for _ in replicas]
        self.backwards_started = [0 for _ in replicas]
        self.is_busy = [False for _ in replicas]
        self.activations: list[_ReadyQueues] = [defaultdict(deque) for _ in replicas]
        self.gradients: list[_ReadyQueues] = [defaultdict(deque) for _ in replicas]
        self.weights_due: list[deque[int]] = [deque() for _ in replicas]
        self.steps: list[list[SimulatedStep]] = [[] for _ in replicas]
        self.runnable: list[int] = []  # idle replicas that may have work now, as a heap of -position
        self._set_mail(request.slots)

    def _set_costs(self, request: PlanRequest, shape: Routes) -> None:
        costs, stage_of = request.costs, self.tables.stage_of
        self.virtual_stages = request.layout.virtual_stages
        self.backward_op = _BACKWARD_INPUT if self.splits else _BACKWARD
        self.forward_costs, self.weight_costs = costs.forward, costs.backward_weight
        self.backward_costs = costs.backward_input if self.splits else costs.backward
        counts = Counter(replica for route in shape for replica in route)
        self.forwards_left = [counts[replica] * request.virtual_stages for replica in range(len(stage_of))]
        time_after, compute_time = min_time_after(request), request.compute_time
        self.time_left = [
            counts[r] * compute_time[stage] * self.factors[r] + time_after[stage] * request.time_scale
            for r, stage in enumerate(stage_of)
        ]
        """The least time until the end of the run, from the start of a replica's next compute."""
        self.end = 0  # before which the run can't end

    def _set_mail(self, slots: int) -> None:
        tables = self.tables
        self.slots, share_pair = slots, tables.targets_share_pair
        takes_two = tables.has_chunks and share_pair  # a forward fills two slots of one pair
        self.mail = Mailboxes(
            tables.num_replicas,
            slots=slots,
            early_read_at=max(1, slots - 1) if takes_two else slots,
            tracks_all=tables.has_chunks,
            wake=self._mark_runnable,
            record=lambda replica, op, number: self.steps[replica].append((op, number, self.clock.now)),
        )
        # Targets with a pair of their own are read early; those that share one, only with a single slot.
        reads_targets = tables.targets_travel and (not share_pair or slots == 1)
        self.reads_early = [
            tables.has_chunks or (reads_targets and stage == tables.last_stage) for stage in tables.stage_of
        ]

    def run(self, pause: Pause) -> int | None:
        """Runs to the end and returns None, or stops at the limit and returns a time before which the run can't end."""
        tables = self.tables
        for number, route in enumerate(tables.routes):
            if tables.chunk_of[number] == 0:
                first = route[tables.first_stage]
                self._enqueue(self.activations, first, first, number)
        starting = [replica for replica, stage in enumerate(tables.stage_of) if stage == tables.first_stage]
        self.runnable = sorted(-replica for replica in starting)
        while True:
            while self.runnable:  # later stages first: their reads free slots for earlier ones
                replica = -heappop(self.runnable)
                if not self.is_busy[replica]:
                    self._start(replica)
            if self.end > self.limit:
                return self.end
            pause()
            ended = self.clock.advance()
            if not ended:
                assert not any(self.forwards_left), "the simulation stopped early"
                return None
            for replica, op, number in ended:
                self._finish(replica, op, number)

    # --- starts ----------------------------------------------------------------------------------------------

    def _start(self, replica: int) -> None:
        """Starts the compute that the schedule prefers among those that can start now, if any."""
        # A forward or a backward may start only with a slot for its result, so whatever starts also ends and is
        # delivered without waiting. The order of the attempts is the schedule's preference: weights right after their
        # backward while forwards are left (ZB-V), then forward or backward. Otherwise weights fill the gaps, because no
        # other replica waits for them.
        if self.reads_early[replica]:
            self.mail.read_from_full_pairs(replica)
        if self.weights_follow and self.forwards_left[replica] and self.weights_due[replica]:
            self._start_weights(replica)
            return
        done = self.backward_first and self._start_backward(replica)
        done = done or self._start_forward(replica)
        done = done or not self.backward_first and self._start_backward(replica)
        if not done and self.weights_due[replica]:
            self._start_weights(replica)

    def _start_weights(self, replica: int) -> None:
        self._compute(replica, _BACKWARD_WEIGHT, self.weights_due[replica].popleft(), self.weight_costs)

    def _start_forward(self, replica: int) -> bool:
        """Starts the first forward of the schedule's order that has arrived and has slots and budget."""
        if self.budgets.left(replica) <= 0:
            return False
        tables, mail, stage = self.tables, self.mail, self.tables.stage_of[replica]
        number = queue_key = -1
        ranks, ready_queues = tables.forward_rank[stage], self.activations[replica]
        for key, queue in ready_queues.items():
            if queue and (number < 0 or ranks[queue[0]] < ranks[number]) and self._has_slots(replica, queue[0]):
                number, queue_key = queue[0], key
        if number < 0 or (tables.has_chunks and not self._may_run_now(replica, number)):
            return False
        self._dequeue(ready_queues, queue_key)
        route, chunk = tables.routes[number], tables.chunk_of[number]
        previous, following = tables.previous[stage][chunk], tables.next[stage][chunk]
        if following is None and tables.targets_travel:
            mail.read(replica, route[tables.first_stage], _READ_TARGETS, number)
        if previous is not None and previous[0] != stage:
            mail.read(replica, route[previous[0]], _READ_ACTIVATION, number)
        if self._sends_targets(stage, chunk):
            mail.take_slot(replica, route[tables.last_stage])
            mail.deliver(replica, route[tables.last_stage], _READ_TARGETS, number)
        if following is not None and following[0] != stage:
            mail.take_slot(replica, route[following[0]])
        self.forwards_left[replica] -= 1
        self.forwards_started[replica] += 1
        self.budgets.take(replica)
        self._compute(replica, _FORWARD, number, self.forward_costs)
        return True

    def _start_backward(self, replica: int) -> bool:
        """Starts the first backward of the schedule's order that has arrived and has a slot for its gradient."""
        waits_for_forwards = self.backwards_wait or (self.fills_budget and self.budgets.in_flight[replica] > 0)
        if waits_for_forwards and self.forwards_left[replica]:
            return False
        tables, mail, stage = self.tables, self.mail, self.tables.stage_of[replica]
        number = queue_key = -1
        ranks, ready_queues = tables.backward_rank[stage], self.gradients[replica]
        for key, queue in ready_queues.items():
            if queue and (number < 0 or ranks[queue[0]] < ranks[number]) and self._has_slot_back(replica, queue[0]):
                number, queue_key = queue[0], key
        if number < 0 or (self.keeps_order and ranks[number] != self.backwards_started[replica]):
            return False
        self.backwards_started[replica] += 1
        self._dequeue(ready_queues, queue_key)
        route, chunk = tables.routes[number], tables.chunk_of[number]
        previous, following = tables.previous[stage][chunk], tables.next[stage][chunk]
        if following is not None and following[0] != stage:
            mail.read(replica, route[following[0]], _READ_GRADIENT, number)
        if previous is not None and previous[0] != stage:
            mail.take_slot(replica, route[previous[0]])
        self._compute(replica, self.backward_op, number, self.backward_costs)
        return True

    def _may_run_now(self, replica: int, number: int) -> bool:
        """With chunks there must be budget for all forwards before it too; a schedule that keeps its order skips none.

        So a replica always keeps a unit of its budget for each forward that it has skipped, and locks none out.
        """
        before = self.tables.num_forwards_before[self.tables.stage_of[replica]][number]
        skipped = before - self.forwards_started[replica]
        return skipped == 0 if self.keeps_order else skipped < self.budgets.left(replica)

    def _sends_targets(self, stage: int, chunk: int) -> bool:
        return self.tables.targets_travel and stage == self.tables.first_stage and chunk == self.tables.last_chunk

    def _has_slots(self, replica: int, number: int) -> bool:
        """Whether the slots for a forward's messages are free."""
        tables, mail = self.tables, self.mail
        stage, route, chunk = tables.stage_of[replica], tables.routes[number], tables.chunk_of[number]
        following = tables.next[stage][chunk]
        if following is None or following[0] == stage:
            return True
        if self._sends_targets(stage, chunk):
            if tables.targets_share_pair:  # one slot serves both in turn
                return mail.num_taken(replica, route[following[0]]) + 2 <= max(self.slots, 2)
            if not mail.is_free(replica, route[tables.last_stage]):
                return False
        return mail.is_free(replica, route[following[0]])

    def _has_slot_back(self, replica: int, number: int) -> bool:
        """Whether the slot for a backward's gradient is free."""
        stage = self.tables.stage_of[replica]
        previous = self.tables.previous[stage][self.tables.chunk_of[number]]
        if previous is None or previous[0] == stage:
            return True
        return self.mail.is_free(replica, self.tables.routes[number][previous[0]])

    def _compute(self, replica: int, op: Op, number: int, costs: tuple[int, ...]) -> None:
        virtual_stage = self.virtual_stages[self.tables.stage_of[replica]][self.tables.chunk_of[number]]
        cost = costs[virtual_stage] * self.factors[replica]
        now = self.clock.now
        self.is_busy[replica] = True
        self.steps[replica].append((op, number, now))
        self.end = max(self.end, now + self.time_left[replica])
        self.time_left[replica] -= cost
        self.clock.add(now + cost, replica, op, number)

    # --- ends ------------------------------------------------------------------------------------------------

    def _finish(self, replica: int, op: Op, number: int) -> None:
        """Returns budgets and passes the result on; its slot was taken at the start."""
        tables, stage, chunk = self.tables, self.tables.stage_of[replica], self.tables.chunk_of[number]
        self.is_busy[replica] = False
        heappush(self.runnable, -replica)
        if op is _BACKWARD_WEIGHT:
            self.budgets.deferred[replica] += 1
        elif op is _FORWARD:
            if not self.has_backward and chunk == tables.last_chunk:  # all chunks of the micro-batch are done
                self.budgets.give_back(replica, tables.last_chunk + 1)
            following = tables.next[stage][chunk]
            if following is not None:
                self._hand_on(self.activations, _READ_ACTIVATION, replica, number, following)
            elif self.has_backward:
                self._enqueue(self.gradients, replica, replica, number)
        else:
            self.budgets.in_flight[replica] += 1
            if self.splits:
                self.weights_due[replica].append(number)
            else:
                self.budgets.deferred[replica] += 1
            self._hand_on(self.gradients, _READ_GRADIENT, replica, number, tables.previous[stage][chunk])

    def _hand_on(self, ready_queues: list[_ReadyQueues], op: Op, replica: int, number: int, hop: Hop) -> None:
        """Passes a result to the replica of a neighbouring virtual stage, by a message unless it is this one."""
        if hop is None:
            return
        stage, chunk = hop
        reader, its_number = self.tables.routes[number][stage], self.tables.same_micro_batch[number][chunk]
        self._enqueue(ready_queues, reader, replica, its_number)
        if reader != replica:
            self.mail.deliver(replica, reader, op, its_number)

    def _enqueue(self, ready_queues: list[_ReadyQueues], replica: int, source: int, number: int) -> None:
        """Adds a virtual micro-batch from `source` to those that `replica` may compute."""
        ready_queues[replica][number if self.tables.has_chunks else source].append(number)

    def _dequeue(self, ready_queues: _ReadyQueues, queue_key: int) -> None:
        ready_queues[queue_key].popleft()
        if self.tables.has_chunks:
            del ready_queues[queue_key]

    def _mark_runnable(self, replica: int) -> None:
        if not self.is_busy[replica]:
            heappush(self.runnable, -replica)
