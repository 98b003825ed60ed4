"""Plans the instruction lists of one iteration, and chooses among several ways to run stages of unequal width.

`plan_pipeline` makes the lists for one request: routes, a simulation of each connected component, and instructions for
its computes and messages. On a straight grid the lists are the textbook's.

Training calls `choose_plan`. A straight grid has nothing to choose. Where replicas were lost or are slow it simulates

    {reroute, drop}     micro-batches leave their home only where it is lost; or pipelines with a loss get no work;
     balance            or, if a replica is slow, they go where they are finished first
  x {whole, split}      the backward pass in one piece, or the gradients of inputs and of weights apart
  x {+0, +1, ...}       micro-batches held above the schedule's own limit

and takes the least makespan; of equal ones the fewest extra in flight, then whole, then reroute. Candidates that can no
longer win are not simulated to the end. The choice is a function of the request and the limits, so all ranks agree.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from parallel3d.pipeline.instructions import RECEIVE_OF, Instruction, Op, ReplicaId, instructions_for
from parallel3d.pipeline.request import NORMAL, Pause, PlanRequest, Routes, Routing, no_pause
from parallel3d.pipeline.routes import RouteComponent, home_replicas, plan_routes, split_components
from parallel3d.pipeline.simulator import SimulatedRun
from parallel3d.pipeline.time_bounds import least_makespan
from parallel3d.pipeline.wide_simulator import simulate_component


class Event(NamedTuple):
    """One compute of the simulated run."""

    replica: ReplicaId
    op: Op
    micro_batch: int
    start: int
    end: int
    chunk: int = 0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run the iteration, and the time it takes."""

    request: PlanRequest
    makespan: int
    is_lower_bound: bool = False
    """Whether its simulation was stopped early: it takes at least this long."""

    @property
    def name(self) -> str:
        backward = ", split backward" if self.request.splits else ""
        extra = f", +{self.request.extra_in_flight} in flight" if self.request.extra_in_flight else ""
        return f"{self.request.routing}{backward}{extra}"

    def __str__(self) -> str:
        return f"{self.name}: {'at least ' if self.is_lower_bound else ''}{self.makespan}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The instructions of every replica for one iteration, and the simulated times."""

    request: PlanRequest
    routes: Routes
    lists: Mapping[ReplicaId, tuple[Instruction, ...]]
    """One list for each live replica; empty if no micro-batch passes it."""
    runs: list[tuple[RouteComponent, SimulatedRun]]
    """The simulation of each part of the grid that shares micro-batches."""
    makespan: int
    candidates: tuple[Candidate, ...] = ()
    """All candidates that were compared; empty where there was nothing to choose."""

    @cached_property
    def busy(self) -> dict[ReplicaId, int]:
        """Time units spent computing."""
        compute_time, factors = self.request.compute_time, self.request.time_factors
        counts = Counter(replica for route in self.routes for replica in enumerate(route))
        return {replica: counts[replica] * compute_time[replica[0]] * factors[replica] for replica in self.lists}

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All computes by start and replica."""
        cost_of, virtual_stages = costs_by_op(self.request), self.request.layout.virtual_stages
        factors = self.request.time_factors
        events = [
            Event(
                replica_id,
                op,
                component.micro_batches[micro_batch],
                start,
                start + cost_of[op][virtual_stages[replica_id[0]][chunk]] * factors[replica_id],
                chunk,
            )
            for component, run in self.runs
            for replica_id, steps in zip(component.replicas, run.steps)
            for op, number, start in steps
            if op in cost_of
            for micro_batch, chunk in [run.virtual_micro_batches[number]]
        ]
        return tuple(sorted(events, key=lambda event: (event.start, event.replica)))

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The home replica id of each micro-batch."""
        return home_replicas(self.request)

    def is_rerouted(self, event: Event) -> bool:
        """Whether a compute runs away from the home of its micro-batch, which that stage has lost."""
        return event.replica[1] != self.homes[event.micro_batch]

    @property
    def bubble(self) -> float:
        """Share of the makespan in which the replicas with the most work are idle.

        On a straight grid of P stages and V chunks (P - 1) / (V m + P - 1), m micro-batches a replica.
        """
        return 1 - max(self.busy.values()) / self.makespan

    @cached_property
    def digest(self) -> str:
        """Hash of all that determines the lists, the same on every machine; ranks compare it before they start."""
        hashed = hashlib.blake2b(repr((list(self.lists), self.routes)).encode(), digest_size=16)
        for component, run in self.runs:
            ops = [[(op._value_, number) for op, number, _ in steps] for steps in run.steps]
            hashed.update(repr((component.replicas, component.micro_batches, ops)).encode())
        return hashed.hexdigest()

    @property
    def reason(self) -> str:
        """One line for logs and reports."""
        request, counts = self.request, [len(ids) for ids in self.request.replicas]
        grid = str(counts[0]) if len(set(counts)) == 1 else "/".join(map(str, counts))
        rerouted = sum({*route} != {home} for route, home in zip(self.routes, self.homes))
        busiest = max(self.busy, key=lambda replica: self.busy[replica])
        compute_time = self.busy[busiest]
        chunks = f" of {request.virtual_stages} chunks" if request.virtual_stages > 1 else ""
        what = (
            f"{request.name} on {len(counts)} stages{chunks} x {grid} replicas, {len(self.routes)} micro-batches, "
            f"{rerouted} rerouted: "
            f"{self.makespan / request.time_scale:g} units, of which {compute_time / request.time_scale:g} are work of "
            f"the busiest replica {busiest}"
        )
        return f"{what}; {self._choice()}" if self.candidates else what

    def _choice(self) -> str:
        chosen = next(candidate for candidate in self.candidates if candidate.request == self.request)
        others = [c for c in self.candidates if c.request.routing != self.request.routing]
        what = f"chosen of {len(self.candidates)}: {chosen.name}"
        if not others:
            return what
        best = min(others, key=lambda candidate: (candidate.makespan, candidate.is_lower_bound))
        bound = "at least " if best.is_lower_bound else ""
        return f"{what}; the best to {best.request.routing} takes {bound}{best.makespan / best.request.time_scale:g}"


def choose_plan(request: PlanRequest, *, may_split: bool, max_extra_in_flight: int, pause: Pause = no_pause) -> Plan:
    """Returns the plan for these replicas: the best candidate where stages differ, by a loss or from the start, or
    replicas are slow.

    A straight grid gets the schedule's own lists, those of equal costs.
    """
    if not any(factor != NORMAL for factors in request.slowness for factor in factors):
        request = replace(request, slowness=())
    if request.is_straight and not request.slowness:
        return plan_pipeline(request.with_equal_costs(), pause)
    chosen: _Simulated | None = None
    table: list[Candidate] = []
    routed_grids: dict[Routing, _RoutedGrid] = {}
    for candidate in _promising_first(_candidates(request, may_split, max_extra_in_flight)):
        routed = routed_grids.get(candidate.routing) or routed_grids.setdefault(
            candidate.routing, _route_grid(candidate)
        )
        limit = None
        if chosen:  # a candidate of higher rank must be faster, the others may be as fast
            limit = chosen.makespan - 1 if _rank(candidate) > _rank(chosen.request) else chosen.makespan
        result = _simulate(candidate, routed, limit, pause)
        if isinstance(result, int):
            table.append(Candidate(request=candidate, makespan=result, is_lower_bound=True))
        else:
            table.append(Candidate(request=candidate, makespan=result.makespan))
            chosen = result
    assert chosen is not None
    return replace(_build_plan(chosen), candidates=tuple(sorted(table, key=lambda entry: _rank(entry.request))))


def complete_candidates(plan: Plan) -> Plan:
    """Returns the plan with its candidates simulated to their ends, for reports."""
    finished = [Candidate(request=c.request, makespan=plan_pipeline(c.request).makespan) for c in plan.candidates]
    return replace(plan, candidates=tuple(finished))


def plan_pipeline(request: PlanRequest, pause: Pause = no_pause) -> Plan:
    """Plans one iteration: routes, lists, simulated times. The same request gives the same plan on every machine."""
    result = _simulate(request, _route_grid(request), None, pause)
    assert not isinstance(result, int)
    return _build_plan(result)


def costs_by_op(request: PlanRequest) -> dict[Op, tuple[int, ...]]:
    """The cost of each compute at each virtual stage."""
    costs = request.costs
    return {
        Op.FORWARD: costs.forward,
        Op.BACKWARD: costs.backward,
        Op.BACKWARD_INPUT: costs.backward_input,
        Op.BACKWARD_WEIGHT: costs.backward_weight,
    }


# --- the choice -------------------------------------------------------------------------------------------------------


def _candidates(request: PlanRequest, may_split: bool, max_extra_in_flight: int) -> list[PlanRequest]:
    splits = [False, True] if may_split and request.has_backward and not request.rules.splits_backward else [False]
    extras = range(max_extra_in_flight + 1 if request.limits_in_flight else 1)
    rerouted = [replace(request, split_backward=split, extra_in_flight=extra) for extra in extras for split in splits]
    dropped = [replace(candidate, routing="drop") for candidate in rerouted] if request.whole_pipelines else []
    balanced = [replace(candidate, routing="balance") for candidate in rerouted] if request.slowness else []
    return sorted(rerouted + balanced + dropped, key=_rank)


def _rank(request: PlanRequest) -> tuple[int, bool, int]:
    """Breaks ties: among candidates of equal makespan the lowest rank is taken."""
    return request.extra_in_flight, request.split_backward, ("reroute", "balance", "drop").index(request.routing)


def _promising_first(candidates: list[PlanRequest]) -> list[PlanRequest]:
    """Sorts likely winners first: the sooner a good makespan is known, the sooner other simulations stop."""
    order = ("balance", "reroute", "drop")
    return sorted(candidates, key=lambda c: (order.index(c.routing), not c.split_backward, -c.extra_in_flight))


# --- one simulation ---------------------------------------------------------------------------------------------------


class _RoutedGrid(NamedTuple):
    """Routes and components, which all requests of the same routing share."""

    routes: Routes
    components: list[RouteComponent]
    loads: set[tuple[int, int]]
    """(stage, micro-batches of one of its replicas x its time factor)"""


class _Simulated(NamedTuple):
    """The runs of all components of one request."""

    request: PlanRequest
    routes: Routes
    runs: list[tuple[RouteComponent, SimulatedRun]]
    makespan: int


def _route_grid(request: PlanRequest) -> _RoutedGrid:
    routes = plan_routes(request)
    factors = request.time_factors
    loads = {
        (stage, count * factors[stage, replica])
        for stage, column in enumerate(zip(*routes))
        for replica, count in Counter(column).items()
    }
    return _RoutedGrid(routes, split_components(routes), loads)


def _simulate(request: PlanRequest, routed: _RoutedGrid, limit: int | None, pause: Pause) -> _Simulated | int:
    """Simulates all components, each shape once; or, past the limit, returns a time before which the plan can't end."""
    if limit is not None and (bound := least_makespan(request, routed.loads)) > limit:
        return bound
    runs: dict[tuple[Routes, tuple[int, ...]], SimulatedRun] = {}
    named: list[tuple[RouteComponent, SimulatedRun]] = []
    for component in routed.components:
        factors = tuple([request.time_factors[replica] for replica in component.replicas]) if request.slowness else ()
        if (component.shape, factors) not in runs:
            run = simulate_component(request, component.shape, limit, pause, factors)
            if isinstance(run, int):
                return run
            runs[component.shape, factors] = run
        named.append((component, runs[component.shape, factors]))
    return _Simulated(request, routed.routes, named, max(run.makespan for run in runs.values()))


# --- names and messages -----------------------------------------------------------------------------------------------


def _build_plan(simulated: _Simulated) -> Plan:
    """Turns a simulation into a plan: names instead of positions, messages around the computes."""
    request = simulated.request
    return Plan(
        request=request,
        routes=simulated.routes,
        lists=_InstructionLists(request, simulated.runs),
        runs=simulated.runs,
        makespan=simulated.makespan,
    )


class _InstructionLists(Mapping[ReplicaId, tuple[Instruction, ...]]):
    """The lists by replica, each made on first use: a rank needs only its own."""

    def __init__(self, request: PlanRequest, runs: list[tuple[RouteComponent, SimulatedRun]]):
        self._made: dict[ReplicaId, tuple[Instruction, ...]] = {}
        self._live = [(stage, replica) for stage, ids in enumerate(request.replicas) for replica in sorted(ids)]
        self._request = request
        self._steps = {
            replica_id: (component, run, position)
            for component, run in runs
            for position, replica_id in enumerate(component.replicas)
        }

    def __getitem__(self, replica_id: ReplicaId) -> tuple[Instruction, ...]:
        if replica_id not in self._made:
            if replica_id in self._steps:
                self._made[replica_id] = tuple(_with_messages(self._request, replica_id[0], *self._steps[replica_id]))
            elif replica_id in self._live:
                self._made[replica_id] = ()
        return self._made[replica_id]

    def __iter__(self) -> Iterator[ReplicaId]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)


def _with_messages(
    request: PlanRequest,
    stage: int,
    component: RouteComponent,
    run: SimulatedRun,
    replica: int,
) -> Iterator[Instruction]:
    """One replica's list: each compute between the receives that it needs and the send of its result."""
    read_early: set[tuple[Op, int]] = set()
    made: dict[int, tuple[Instruction, ...]] = {}
    for op, number, _ in run.steps[replica]:
        position, chunk = run.virtual_micro_batches[number]
        if number not in made:
            made[number] = instructions_for(
                tuple([component.replicas[each][1] for each in component.shape[position]]),
                component.micro_batches[position],
                stage,
                chunk,
                layout=request.layout,
                backward=request.has_backward,
                split=request.splits,
            )
        if op in _RECEIVES:
            read_early.add((op, number))
            yield next(step for step in made[number] if step.op is op)
        else:
            yield from (step for step in _around(op, made[number]) if (step.op, number) not in read_early)


_RECEIVES = frozenset(RECEIVE_OF.values())
_BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT)
_FIRST_OF_BACKWARD = (Op.RECV_GRADIENT, *_BACKWARDS)


def _around(op: Op, every: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """The part of a virtual micro-batch's instructions that belongs to one of its computes."""
    middle = next((i for i, step in enumerate(every) if step.op in _FIRST_OF_BACKWARD), len(every))
    if op is Op.FORWARD:
        return every[:middle]
    if op is Op.BACKWARD_WEIGHT:
        return every[-1:]
    return every[middle:-1] if every[-1].op is Op.BACKWARD_WEIGHT else every[middle:]
