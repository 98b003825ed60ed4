"""Counts what a schedule holds and how long it idles, from the planner's own simulation of one pipeline. Pure.

Replicas of a straight grid do not meet in the pipeline, so one of each stage is simulated, with the textbook's equal
costs, as training plans it. Beyond a few rounds of micro-batches nothing new happens: each adds its own time, and only
schedules without a limit hold more. What a stage holds follows from the order of its instructions alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from parallel3d.pipeline.instructions import Instruction, Op
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import plan_pipeline
from parallel3d.pipeline.request import PlanRequest
from parallel3d.pipeline.schedules import SCHEDULES

ROUNDS = 3
"""Rounds of as many micro-batches as stages that are simulated."""
MESSAGES_A_CHUNK = 2
"""Activations and gradients between stages that a stage holds at once, for each of its chunks: what came and what goes.
The plan checker counts as many on straight grids."""


@dataclass(frozen=True, kw_only=True)
class PipelineFacts:
    """One pipeline of a straight grid."""

    idle: float
    """Time that a stage waits in a step, in the time that it takes for one micro-batch."""
    stashed: tuple[float, ...]
    """By stage: the most that is kept for backward passes, in what one of its chunks keeps of one micro-batch."""
    num_messages: int
    """The most activations and gradients between stages that a stage holds at once."""

    def bubble(self, num_micro_batches: int) -> float:
        """The idle share of a step."""
        return self.idle / (num_micro_batches + self.idle)


def pipeline_facts(
    schedule: str, num_stages: int, num_chunks: int, num_micro_batches: int, deferred: float = 1.0
) -> PipelineFacts:
    """Simulates one pipeline, or remembers it. `deferred` is what a chunk keeps between the halves of a split backward
    pass, as a multiple of what it keeps between forward and backward."""
    count = _enough(num_stages, num_micro_batches)
    facts = _simulate(schedule, num_stages, num_chunks, count, deferred)
    if SCHEDULES[schedule].limits_in_flight or count == num_micro_batches:
        return facts
    return replace(facts, stashed=tuple(each * num_micro_batches / count for each in facts.stashed))


@cache
def _simulate(schedule: str, num_stages: int, num_chunks: int, count: int, deferred: float) -> PipelineFacts:
    request = PlanRequest(
        replicas=((0,),) * num_stages,
        num_micro_batches=count,
        schedule=schedule,
        costs=StageCosts.equal(num_stages * num_chunks),
        virtual_stages=num_chunks,
    )
    plan = plan_pipeline(request)
    busy = sum(request.costs.total) / num_stages
    changes = {
        Op.FORWARD: 1.0,
        Op.BACKWARD: -1.0,
        Op.BACKWARD_INPUT: deferred - 1.0,
        Op.BACKWARD_WEIGHT: -deferred,
    }
    return PipelineFacts(
        idle=(plan.makespan - busy * count) / busy,
        stashed=tuple(_most_stashed(plan.lists[stage, 0], changes) for stage in range(num_stages)),
        num_messages=MESSAGES_A_CHUNK * num_chunks if num_stages > 1 else 0,
    )


def _most_stashed(steps: Iterable[Instruction], changes: Mapping[Op, float]) -> float:
    return max(accumulate((changes.get(step.op, 0.0) for step in steps), initial=0.0))


def _enough(num_stages: int, num_micro_batches: int) -> int:
    """Micro-batches to simulate: as many as there are, or some rounds and the same rest."""
    most = ROUNDS * num_stages
    if num_micro_batches <= most + num_stages:
        return num_micro_batches
    return most + (num_micro_batches - most) % num_stages
