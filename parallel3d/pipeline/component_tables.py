"""Tables of one component for the simulator: numbers of virtual micro-batches, their orders, and their next stages.

A virtual micro-batch, (micro-batch, chunk), is identified by its number: its position in the order of stage 0's
forwards. Without chunks that is the micro-batch itself.
"""

from __future__ import annotations

from collections import Counter

from parallel3d.pipeline.request import PlanRequest, Routes
from parallel3d.pipeline.schedules.schedule import Component, VirtualMicroBatch

Hop = tuple[int, int] | None
"""(stage, chunk) of a neighbouring virtual stage; None at the ends."""


class ComponentTables:
    """Static tables of one component; `routes[number][stage]` is a replica."""

    def __init__(self, request: PlanRequest, shape: Routes):
        layout, rules = request.layout, request.rules
        self.stage_of = [stage for _, stage in sorted({(r, stage) for route in shape for stage, r in enumerate(route)})]
        self.num_replicas = len(self.stage_of)
        self.component = Component(
            layout=layout,
            routes=shape,
            stage_of=tuple(self.stage_of),
            splits_backward=request.splits,
            extra_in_flight=request.extra_in_flight,
        )
        self.has_chunks, self.last_chunk = request.virtual_stages > 1, request.virtual_stages - 1
        stages = range(request.num_stages)
        forwards = [rules.forward_order(self.component, stage) for stage in stages]
        self.virtual_micro_batches: list[VirtualMicroBatch] = forwards[0]
        number_of = {virtual_micro_batch: n for n, virtual_micro_batch in enumerate(forwards[0])}
        self.routes = [shape[micro_batch] for micro_batch, _ in forwards[0]]
        self.chunk_of = [chunk for _, chunk in forwards[0]]
        self.same_micro_batch = [
            [number_of[micro_batch, chunk] for chunk in range(request.virtual_stages)] for micro_batch, _ in forwards[0]
        ]
        """By number and chunk: the number of the same micro-batch with that chunk."""
        self.forward_rank = [_ranks(order, number_of) for order in forwards]
        """By stage and number: the position in the order of that stage's forwards."""
        self.backward_rank = [_ranks(rules.backward_order(self.component, stage), number_of) for stage in stages]
        self.num_forwards_before = (
            [self._count_forwards_before(stage, order, number_of) for stage, order in enumerate(forwards)]
            if self.has_chunks
            else []
        )
        """By stage and number: the number of its replica's forwards before it in that order."""
        neighbours: list[Hop] = [None, *((stage, layout.chunks[k]) for k, stage in enumerate(layout.stages)), None]
        self.previous = [[neighbours[k] for k in mine] for mine in layout.virtual_stages]
        """By stage and chunk: the virtual stage before it."""
        self.next = [[neighbours[k + 2] for k in mine] for mine in layout.virtual_stages]
        self.first_stage, self.last_stage = layout.first_stage, layout.last_stage
        self.targets_travel = self.first_stage != self.last_stage
        after_targets = self.next[self.first_stage][self.last_chunk]
        self.targets_share_pair = self.targets_travel and after_targets == (self.last_stage, self.last_chunk)
        """Whether a micro-batch's targets and its last activation travel between the same two replicas."""

    def _count_forwards_before(
        self, stage: int, order: list[VirtualMicroBatch], number_of: dict[VirtualMicroBatch, int]
    ) -> list[int]:
        counts: Counter[int] = Counter()
        before = [0] * len(order)
        for number in map(number_of.__getitem__, order):
            replica = self.routes[number][stage]
            before[number] = counts[replica]
            counts[replica] += 1
        return before


def _ranks(order: list[VirtualMicroBatch], number_of: dict[VirtualMicroBatch, int]) -> list[int]:
    ranks = [0] * len(order)
    for rank, virtual_micro_batch in enumerate(order):
        ranks[number_of[virtual_micro_batch]] = rank
    return ranks
