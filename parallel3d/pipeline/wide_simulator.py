"""The simulation of wide components, all replicas at once: the run of `pipeline/simulator.py`, in a tenth of its time.

Replicas influence each other within an instant only through slots: one that reads a message may let its sender start.
As long as no compute waits for a slot, the order in which replicas start at an instant has no effect on what they
start, so one pass over arrays decides for all of them. The first compute that would have to wait ends the attempt, and
the other simulation runs. On grids of 16 x 64 with a few losses and 3 slots none ever waits.

Targets alone are handled one by one: full pairs of theirs are read early.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallel3d.pipeline.instructions import Op
from parallel3d.pipeline.mailboxes import Mailboxes
from parallel3d.pipeline.request import Pause, PlanRequest, Routes, no_pause
from parallel3d.pipeline.schedules.schedule import Component, Schedule
from parallel3d.pipeline.simulator import SimulatedRun, SimulatedStep, simulate
from parallel3d.pipeline.time_bounds import min_time_after

Array = NDArray[np.int64]

MIN_REPLICAS = 128
"""Below it single replicas are simulated faster."""
_NONE = 1 << 62
"""No micro-batch; no time."""
_FORWARD, _BACKWARD, _WEIGHT, _TARGETS = range(4)


def simulate_component(
    request: PlanRequest,
    shape: Routes,
    limit: int | None = None,
    pause: Pause = no_pause,
    factors: tuple[int, ...] = (),
) -> SimulatedRun | int:
    """`simulate`, by the faster way."""
    if fits_all_at_once(request) and max(map(max, shape)) >= MIN_REPLICAS:
        result = simulate_all_at_once(request, shape, limit, pause, factors)
        if result is not None:
            return result
    return simulate(request, shape, limit, pause, factors)


def fits_all_at_once(request: PlanRequest) -> bool:
    """Whether replicas take whatever comes first, with one chunk each and targets that have a pair of their own."""
    rules = type(request.rules)
    is_plain = rules.forward_order is Schedule.forward_order and rules.backward_order is Schedule.backward_order
    waits = rules.keeps_order is not Schedule.keeps_order or rules.backwards_wait or rules.weights_follow
    return is_plain and not waits and request.has_backward and request.virtual_stages == 1 and request.num_stages > 2


def simulate_all_at_once(
    request: PlanRequest,
    shape: Routes,
    limit: int | None = None,
    pause: Pause = no_pause,
    factors: tuple[int, ...] = (),
) -> SimulatedRun | int | None:
    """As `simulate`; None if a compute would have to wait for a slot."""
    try:
        return _WideSimulation(request, shape, factors).run(_NONE if limit is None else limit, pause)
    except _SlotIsFull:
        return None


class _SlotIsFull(Exception):
    """A compute would have to wait for a slot."""


class _Tables:
    """What depends on the routes alone, for all candidates."""

    def __init__(self, shape: Routes):
        self.routes: Array = np.array(shape, dtype=np.int64)
        before, after = self.routes[:, :1], self.routes[:, -1:]
        # (micro-batch, stage): the pair over which it comes to that stage; at the ends a replica's pair with itself
        self.activation_pairs = _Pairs(self.routes, np.hstack([before, self.routes[:, :-1]]))
        self.gradient_pairs = _Pairs(self.routes, np.hstack([self.routes[:, 1:], after]))
        self.counts = np.bincount(self.routes.ravel())
        self.stage_of = np.empty(len(self.counts), dtype=np.int64)
        for stage, column in enumerate(self.routes.T):
            self.stage_of[column] = stage


class _Pairs:
    """Ordered pairs of replicas, sorted by reader."""

    def __init__(self, readers: Array, sources: Array):
        num_replicas = int(readers.max()) + 1
        keys, number = np.unique(readers * num_replicas + sources, return_inverse=True)
        self.pair_of: Array = number.reshape(readers.shape)
        """By micro-batch and stage."""
        self.begins: Array = np.concatenate([[0], np.cumsum(np.bincount(number.ravel()))])
        """By pair: the place of its first message among those of all pairs."""
        self.first_of_reader: Array = np.searchsorted(keys // num_replicas, np.arange(num_replicas))


_tables_of = lru_cache(maxsize=1)(_Tables)


class _Queues:
    """The messages that have come over each pair and are not used yet, oldest first; and the slots of the pairs."""

    def __init__(self, pairs: _Pairs, slots: int):
        self.pair_of, self._first_of_reader, self._slots = pairs.pair_of, pairs.first_of_reader, slots
        self._numbers = np.full(pairs.begins[-1] + 1, _NONE)
        self._head, self._tail = pairs.begins[:-1].copy(), pairs.begins[:-1].copy()
        self._oldest = np.full(len(self._head), _NONE)
        self._taken = np.zeros(len(self._head), dtype=np.int64)

    def fill(self, stage: int) -> None:
        """Puts all micro-batches into the queues of a stage."""
        pairs = self.pair_of[:, stage]
        order = np.argsort(pairs, kind="stable")
        unique, first, counts = np.unique(pairs[order], return_index=True, return_counts=True)
        places = self._head[pairs[order]] + np.arange(len(order)) - np.repeat(first, counts)
        self._numbers[places] = order
        self._tail[unique] += counts
        self._oldest[unique] = order[first]

    def first_by_reader(self) -> Array:
        """By replica the lowest of its oldest messages."""
        return np.minimum.reduceat(self._oldest, self._first_of_reader)

    def push(self, pairs: Array, numbers: Array) -> None:
        """Adds one message each to different pairs."""
        tail = self._tail[pairs]
        self._numbers[tail] = numbers
        self._tail[pairs] = tail + 1
        self._oldest[pairs] = np.minimum(self._oldest[pairs], np.where(tail == self._head[pairs], numbers, _NONE))

    def pop(self, pairs: Array) -> None:
        """Removes the oldest message of each."""
        head = self._head[pairs] + 1
        self._head[pairs] = head
        self._oldest[pairs] = np.where(head < self._tail[pairs], self._numbers[head], _NONE)

    def take_slots(self, pairs: Array) -> None:
        if (self._taken[pairs] >= self._slots).any():
            raise _SlotIsFull
        self._taken[pairs] += 1

    def free_slots(self, pairs: Array) -> None:
        self._taken[pairs] -= 1


class _StepLists(Sequence[list[SimulatedStep]]):
    """The steps of each replica, made on first use: a rank needs only its own."""

    def __init__(self, events: Array, num_replicas: int, ops: tuple[Op, ...]):
        """`events` (replica, index of the op, number, start) in the order of time."""
        self._unsorted, self._num_replicas, self._ops = events, num_replicas, ops

    @cached_property
    def _events(self) -> Array:
        """Sorted by replica."""
        return self._unsorted[np.argsort(self._unsorted[:, 0], kind="stable")]

    @cached_property
    def _begins(self) -> Array:
        return np.searchsorted(self._events[:, 0], np.arange(self._num_replicas + 1))

    def __len__(self) -> int:
        return self._num_replicas

    def __getitem__(self, replica: Any) -> Any:  # a slice is not asked for
        own = self._events[self._begins[replica] : self._begins[replica + 1]]
        return [(self._ops[op], number, start) for _, op, number, start in _listed(own)]

    def __iter__(self) -> Iterator[list[SimulatedStep]]:
        return (self[replica] for replica in range(len(self)))


class _Starts(NamedTuple):
    """Replicas that start one kind of compute at an instant."""

    replicas: Array
    numbers: Array
    stages: Array


class _WideSimulation:
    """Simulates one component, instant by instant."""

    def __init__(self, request: PlanRequest, shape: Routes, factors: tuple[int, ...]):
        self.tables = tables = _tables_of(shape)
        costs, rules, stage_of = request.costs, request.rules, tables.stage_of
        component = Component(
            layout=request.layout,
            routes=shape,
            stage_of=tuple(_listed(stage_of)),
            splits_backward=request.splits,
            extra_in_flight=request.extra_in_flight,
        )
        self.num_replicas, self.last_stage, self.splits = len(stage_of), request.num_stages - 1, request.splits
        self.backward_first = rules.prefers_backward(component)
        backward = costs.backward_input if self.splits else costs.backward
        self.costs = np.array([costs.forward, backward, costs.backward_weight])[:, list(_stages(request))]
        self.in_flight = np.array(rules.in_flight_budgets(component))
        self.deferred = np.array(rules.deferred_budgets(component) if self.splits else [_NONE] * self.num_replicas)
        self.factors = np.array(factors or (1,) * self.num_replicas)
        self.time_left = tables.counts * np.array(request.compute_time)[stage_of] * self.factors
        self.time_left += np.array(min_time_after(request))[stage_of] * request.time_scale
        self.activations = _Queues(tables.activation_pairs, request.slots)
        self.gradients = _Queues(tables.gradient_pairs, request.slots)
        self.due_begins = np.cumsum(tables.counts) - tables.counts
        self.due = np.zeros(int(tables.counts.sum()), dtype=np.int64)
        self.num_due, self.num_done = np.zeros((2, self.num_replicas), dtype=np.int64)
        self.end_of = np.full(self.num_replicas, _NONE)
        self.kind, self.number = np.zeros((2, self.num_replicas), dtype=np.int64)
        self.now = self.end = 0
        self.events: list[Array] = []
        self.early: list[tuple[int, int, int, int]] = []
        self.readers_to_check: set[int] = set()
        self.mail = Mailboxes(
            self.num_replicas,
            slots=request.slots,
            early_read_at=request.slots,
            tracks_all=False,
            wake=lambda replica: None,
            record=lambda replica, op, number: self.early.append((replica, _TARGETS, number, self.now)),
        )

    def run(self, limit: int, pause: Pause) -> SimulatedRun | int:
        """Runs to the end, or until a replica can't meet the limit."""
        self.activations.fill(0)
        while True:
            self._start_all()
            if self.end > limit:
                return self.end
            pause()
            now = int(self.end_of.min())
            if now == _NONE:
                break
            self.now = now
            self._finish_all(np.flatnonzero(self.end_of == now))
        num_micro_batches = len(self.tables.routes)
        ops = (Op.FORWARD, Op.BACKWARD_INPUT if self.splits else Op.BACKWARD, Op.BACKWARD_WEIGHT, Op.RECV_TARGETS)
        steps = _StepLists(np.concatenate(self.events), self.num_replicas, ops)
        return SimulatedRun([(number, 0) for number in range(num_micro_batches)], steps, self.now)

    # --- starts -------------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        """Starts what the schedule prefers on every idle replica; see `simulator._Simulation._start`."""
        idle = self.end_of == _NONE
        for reader in [reader for reader in self.readers_to_check if idle[reader]]:
            self.mail.read_from_full_pairs(reader)
            self.readers_to_check.remove(reader)
        forward, backward = self.activations.first_by_reader(), self.gradients.first_by_reader()
        has_forward = idle & (forward < _NONE) & (self.in_flight > 0) & (self.deferred > 0)
        has_backward = idle & (backward < _NONE)
        if self.backward_first:
            has_forward &= ~has_backward
        else:
            has_backward &= ~has_forward
        has_weight = idle & (self.num_done < self.num_due) & ~has_forward & ~has_backward
        self._start_backwards(self._starts(has_backward, backward))
        self._start_forwards(self._starts(has_forward, forward), idle & ~(has_forward | has_backward | has_weight))
        self._start_weights(np.flatnonzero(has_weight))
        if self.early:  # they come before the computes of this instant
            self.events.insert(len(self.events) - 3, np.array(self.early))
            self.early.clear()

    def _starts(self, chosen: NDArray[np.bool_], numbers: Array) -> _Starts:
        replicas = np.flatnonzero(chosen)
        return _Starts(replicas, numbers[replicas], self.tables.stage_of[replicas])

    def _start_forwards(self, starts: _Starts, stays_idle: NDArray[np.bool_]) -> None:
        replicas, numbers, stages = starts
        queues = self.activations
        pairs = queues.pair_of[numbers, stages]
        queues.pop(pairs)
        queues.free_slots(pairs[stages > 0])  # the readers are later stages, which start first
        sends = stages < self.last_stage
        queues.take_slots(queues.pair_of[numbers[sends], stages[sends] + 1])
        self.in_flight[replicas] -= 1
        self.deferred[replicas] -= 1
        self._move_targets(starts, stays_idle)
        self._compute(starts.replicas, numbers, _FORWARD)

    def _move_targets(self, starts: _Starts, stays_idle: NDArray[np.bool_]) -> None:
        """Reads targets at the last stage, then sends them from the first; idle readers of full pairs read early."""
        routes, mail = self.tables.routes, self.mail
        for replica, number in _pairs_at(starts, self.last_stage):
            mail.read(replica, int(routes[number, 0]), Op.RECV_TARGETS, number)
        for replica, number in reversed(_pairs_at(starts, 0)):
            reader = int(routes[number, -1])
            if not mail.is_free(replica, reader):
                raise _SlotIsFull
            mail.take_slot(replica, reader)
            mail.deliver(replica, reader, Op.RECV_TARGETS, number)
            if mail.is_free(replica, reader):
                continue
            if stays_idle[reader]:
                mail.read_early(reader, replica)  # no other pair of an idle reader is full
            else:
                self.readers_to_check.add(reader)

    def _start_backwards(self, starts: _Starts) -> None:
        replicas, numbers, stages = starts
        queues = self.gradients
        pairs, sends = queues.pair_of[numbers, stages], stages > 0
        queues.take_slots(queues.pair_of[numbers[sends], stages[sends] - 1])  # the readers are earlier stages
        queues.pop(pairs)
        queues.free_slots(pairs[stages < self.last_stage])
        self._compute(replicas, numbers, _BACKWARD)

    def _start_weights(self, replicas: Array) -> None:
        numbers = self.due[self.due_begins[replicas] + self.num_done[replicas]]
        self.num_done[replicas] += 1
        self._compute(replicas, numbers, _WEIGHT)

    def _compute(self, replicas: Array, numbers: Array, kind: int) -> None:
        cost = self.costs[kind, self.tables.stage_of[replicas]] * self.factors[replicas]
        self.kind[replicas], self.number[replicas], self.end_of[replicas] = kind, numbers, self.now + cost
        self.end = max(self.end, int((self.now + self.time_left[replicas]).max(initial=0)))
        self.time_left[replicas] -= cost
        columns = (replicas, np.full(len(replicas), kind), numbers, np.full(len(replicas), self.now))
        self.events.append(np.stack(columns, axis=1))

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _finish_all(self, replicas: Array) -> None:
        """Returns budgets and passes results on."""
        self.end_of[replicas] = _NONE
        kind, number, stage = self.kind[replicas], self.number[replicas], self.tables.stage_of[replicas]
        self.deferred[replicas[kind == _WEIGHT]] += 1
        moves = (kind == _FORWARD) & (stage < self.last_stage)
        self.activations.push(self.activations.pair_of[number[moves], stage[moves] + 1], number[moves])
        turns = (kind == _FORWARD) & (stage == self.last_stage)
        self.gradients.push(self.gradients.pair_of[number[turns], stage[turns]], number[turns])
        is_backward = kind == _BACKWARD
        done = replicas[is_backward]
        self.in_flight[done] += 1
        if self.splits:
            self.due[self.due_begins[done] + self.num_due[done]] = number[is_backward]
            self.num_due[done] += 1
        else:
            self.deferred[done] += 1
        moves = is_backward & (stage > 0)
        self.gradients.push(self.gradients.pair_of[number[moves], stage[moves] - 1], number[moves])


def _stages(request: PlanRequest) -> Iterator[int]:
    """The virtual stage of each stage."""
    return (mine[0] for mine in request.layout.virtual_stages)


def _pairs_at(starts: _Starts, stage: int) -> list[tuple[int, int]]:
    """(replica, number) of the starts at a stage."""
    at = starts.stages == stage
    return list(zip(_listed(starts.replicas[at]), _listed(starts.numbers[at])))


def _listed(array: Array) -> list[Any]:
    return array.tolist()
