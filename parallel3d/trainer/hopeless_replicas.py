"""Which slow replica a run is better off without. Pure.

A plan that knows the speeds gives a slow replica what it can do in time. If that is nothing, it only holds up what is
not in the plan: the update of its ranges, and what others wait for between two steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallel3d.pipeline.instructions import ReplicaId
from parallel3d.pipeline.request import NORMAL, Routes
from parallel3d.pipeline.slow_plan import true_makespan
from parallel3d.trainer.batching import plan_batch
from parallel3d.trainer.plans import Plans, costs_of_passes
from parallel3d.trainer.state import TrainState

USELESS = 4 * NORMAL
"""A replica that is so slow leaves if the plan without it takes no longer. One that is less slow stays as a copy of its
state, though it may be of no use only because the micro-batches don't divide well."""
WORTH_IT = 0.95
"""A less slow one leaves, too, if steps then take at most this share."""
MIN_REPLICAS = 3
"""Of a stage from which one leaves: the loss of the last one would end the run."""


@dataclass(frozen=True, kw_only=True)
class HopelessReplica:
    """A replica that should leave."""

    replica: ReplicaId
    ranks: tuple[int, ...]
    factor: float
    """Its time, by that of the fastest of its stage."""
    step_share: float
    """Planned time of a step without it, by that with it."""


def settled_slow_replicas(plans: Plans, state: TrainState) -> tuple[ReplicaId, ...]:
    """The slow replicas that could leave, the slowest first: their slowness has not changed for a while."""
    grid, speeds, slowness = plans.grid, state.speeds, plans.slowness(state)
    found = []
    for (stage, worker), known in speeds.slowness.items():
        if grid.holds(worker) and (stage, worker) not in speeds.held and len(grid.stages[stage]) >= MIN_REPLICAS:
            replica = grid.coordinates(worker).replica
            if (factor := _factor(plans, slowness, replica)) > NORMAL:
                found.append((-factor, -known, replica))
    return tuple(replica for *_, replica in sorted(found))


def find_hopeless(plans: Plans, state: TrainState) -> HopelessReplica | None:
    """Returns the slowest replica without which a step of full size takes no longer (`USELESS`), or much less."""
    slowness = plans.slowness(state)
    for replica in settled_slow_replicas(plans, state):
        ranks, factor = plans.grid.tp_ranks(replica), _factor(plans, slowness, replica)
        rest, _ = plans.grid.without(ranks)
        share = _step_time(Plans(plans.config, rest), state) / _step_time(plans, state)
        if share <= (1.0 if factor >= USELESS else WORTH_IT):
            return HopelessReplica(replica=replica, ranks=ranks, factor=factor / NORMAL, step_share=share)
    return None


def _factor(plans: Plans, slowness: Routes, replica: ReplicaId) -> int:
    stage, number = replica
    return slowness[stage][plans.grid.replicas[stage].index(number)] if slowness else NORMAL


def _step_time(plans: Plans, state: TrainState) -> int:
    """The time of a step of full size in the true times, in 1 / `NORMAL` of the costs' units."""
    slowness = plans.slowness(state)
    plan = plans.train(plan_batch(plans.config, 0).num_micro_batches, slowness)
    request = replace(plan.request, costs=costs_of_passes(plans.config), slowness=slowness)
    return true_makespan(plan, request) * (1 if slowness else NORMAL)
