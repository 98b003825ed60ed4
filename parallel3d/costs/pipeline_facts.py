"""Counts what a schedule holds and how long it idles, from the planner's own simulation of one pipeline. Pure.

Replicas of a straight grid do not meet in the pipeline, so one of each stage is simulated, with the textbook's equal
costs, as training plans it. Beyond a few rounds of micro-batches nothing new happens: each adds its own time, and only
schedules without a limit hold more. What a stage holds follows from the order of its instructions alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from parallel3d.pipeline.instructions import Op
from parallel3d.pipeline.partition import StageCosts
from parallel3d.pipeline.planner import Plan, plan_pipeline
from parallel3d.pipeline.request import PlanRequest
from parallel3d.pipeline.schedules import SCHEDULES

ROUNDS = 2
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
    chain_length: int
    """Messages between stages on the longest path through a step: by as many times one message it takes longer. Those
    that fill and drain the pipeline, and where a stage holds no more micro-batches than cover the passes of a round
    trip (1f1b), those of a round trip again for each round of as many micro-batches as stages."""

    def bubble(self, num_micro_batches: int) -> float:
        """The idle share of a step."""
        return self.idle / (num_micro_batches + self.idle)


def pipeline_facts(
    schedule: str, num_stages: int, num_chunks: int, num_micro_batches: int, deferred: float = 1.0
) -> PipelineFacts:
    """Simulates one pipeline, or remembers it. `deferred` is what a chunk keeps between the halves of a split backward
    pass, as a multiple of what it keeps between forward and backward."""
    count = _enough(num_stages, num_micro_batches)
    idle, held, chain_length = _simulate(schedule, num_stages, num_chunks, count)
    if more_rounds := (num_micro_batches - count) // num_stages:
        chain_length += more_rounds * _chain_growth(schedule, num_stages, num_chunks)
    more = 1.0 if SCHEDULES[schedule].limits_in_flight else num_micro_batches / count
    return PipelineFacts(
        idle=idle,
        stashed=tuple(more * max(whole + deferred * half for whole, half in pairs) for pairs in held),
        num_messages=MESSAGES_A_CHUNK * num_chunks if num_stages > 1 else 0,
        chain_length=chain_length,
    )


_Held = frozenset[tuple[int, int]]
"""What a stage holds at some times: (micro-batches before their backward pass, those between its halves)."""


@cache
def _simulate(schedule: str, num_stages: int, num_chunks: int, count: int) -> tuple[float, tuple[_Held, ...], int]:
    request = PlanRequest(
        replicas=((0,),) * num_stages,
        num_micro_batches=count,
        schedule=schedule,
        costs=StageCosts.equal(num_stages * num_chunks),
        virtual_stages=num_chunks,
    )
    plan = plan_pipeline(request)
    busy = sum(request.costs.total) / num_stages
    [(_, run)] = plan.runs
    idle, held = (plan.makespan - busy * count) / busy, tuple(_held([op for op, _, _ in steps]) for steps in run.steps)
    return idle, held, _chain_length(plan)


def _chain_growth(schedule: str, num_stages: int, num_chunks: int) -> int:
    """What each round after the first ones adds to the chain of messages."""
    longer, shorter = (
        _simulate(schedule, num_stages, num_chunks, rounds * num_stages)[2] for rounds in (ROUNDS + 1, ROUNDS)
    )
    return longer - shorter


def _chain_length(plan: Plan) -> int:
    """Messages between stages on the longest path through the simulated step."""
    layout, last = plan.request.layout, plan.request.layout.last
    free = [(0, 0)] * len(layout.virtual_stages)
    """When each stage ends what it has begun, and the messages on the longest path there."""
    ends: dict[tuple[bool, int, int], tuple[int, int]] = {}
    for event in plan.events:
        stage = event.replica[0]
        place, is_forward = layout.virtual_stages[stage][event.chunk], event.op is Op.FORWARD
        source = place - 1 if is_forward else place + 1
        ready = free[stage]
        if event.op is not Op.BACKWARD_WEIGHT and 0 <= source <= last:
            time, messages = ends[is_forward, source, event.micro_batch]
            ready = max(ready, (time, messages + (layout.stages[source] != stage)))
        free[stage] = (event.end, ready[1])
        if event.op is not Op.BACKWARD_WEIGHT:
            ends[is_forward, place, event.micro_batch] = free[stage]
    return max(free)[1]


def _held(ops: Iterable[Op]) -> _Held:
    whole = half = 0
    found = set()
    for op in ops:
        if op is Op.FORWARD:
            whole += 1
        elif op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            whole -= 1
            half += op is Op.BACKWARD_INPUT
        elif op is Op.BACKWARD_WEIGHT:
            half -= 1
        found.add((whole, half))
    return frozenset(found)


def _enough(num_stages: int, num_micro_batches: int) -> int:
    """Micro-batches to simulate: as many as there are, or some rounds and the same rest."""
    most = ROUNDS * num_stages
    if num_micro_batches <= most + num_stages:
        return num_micro_batches
    return most + (num_micro_batches - most) % num_stages
