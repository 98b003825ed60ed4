"""ZB-V (Qi et al. 2023, "Zero bubble pipeline parallelism", section 6; V-shape: Qi et al. 2024, "Pipeline parallelism
with controllable memory"): two chunks a stage, laid out in a V, and a split backward pass.

Stage p holds virtual stages p and 2P - 1 - p. A micro-batch goes down through all stages and back up, so the loss is
computed on the first stage, and what is forwarded last there is what is backwarded first. A stage holds at most 2P
virtual micro-batches, as many activations as 1F1B's first stage.

A stage first runs 2(P - p) - 1 forwards of its first chunk, which is when its first micro-batch comes back up, and then
takes both chunks in turn. With equal costs of F, B and W, and at least P micro-batches, each stage computes without a
pause from its first forward on: the iteration takes 6 m chunk passes and the P - 1 that the last stage waits for its
first micro-batch. (The paper also lets the next iteration begin before all stages have ended; ours end it together.)

Progress: in its order a replica's forward of the second chunk comes after those of the first chunk of at most
2(P - p) - 1 micro-batches that do not precede it. So if all stood still, let m be the first micro-batch that is not
done. Fewer than 2P virtual micro-batches count against its next forward: there is room for it.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, islice

from parallel3d.pipeline.chunk_layout import ChunkLayout
from parallel3d.pipeline.schedules.schedule import Component, Schedule, VirtualMicroBatch


class ZeroBubbleV(Schedule):
    """Two chunks a stage in a V, and a split backward pass."""

    name = "zb-v"
    summary = (
        "zero bubble in a V: stage p holds the virtual stages p and 2 * pp_size - 1 - p and splits the backward pass; a"
        " sixth of 1f1b's bubble for the same activations. Needs virtual_stages 2."
    )
    min_chunks = 2
    max_chunks = 2
    splits_backward = True
    weights_follow = True
    fills_budget = False
    suitable_micro_batches = "at least parallel.pp_size micro-batches a replica"

    def chunk_layout(self, num_stages: int, num_chunks: int) -> ChunkLayout:
        return ChunkLayout.v_shape(num_stages)

    def bubble(self, num_stages: int, num_chunks: int, num_micro_batches: float) -> float:
        return (num_stages - 1) / (6 * num_micro_batches + num_stages - 1)

    def suits(self, num_stages: int, num_micro_batches: float) -> bool:
        return num_micro_batches >= num_stages

    def forward_order(self, component: Component, stage: int) -> list[VirtualMicroBatch]:
        num_stages = component.num_stages
        warmup = [0] * (2 * (num_stages - stage) - 1) + [1, 0] * stage + [1] * (num_stages - stage)
        return _in_turn(component, stage, warmup)

    def backward_order(self, component: Component, stage: int) -> list[VirtualMicroBatch]:
        return _in_turn(component, stage, [1] * (component.num_stages - stage))

    def keeps_order(self, component: Component) -> bool:
        return len(set(component.routes)) == 1

    def in_flight_budgets(self, component: Component) -> list[int]:
        return [2 * component.num_stages + component.extra_in_flight for _ in component.stage_of]


def _in_turn(component: Component, stage: int, warmup: list[int]) -> list[VirtualMicroBatch]:
    """The virtual micro-batches of each replica of a stage: chunks as in `warmup`, then first and second in turn."""
    mine: defaultdict[int, list[int]] = defaultdict(list)
    for micro_batch, route in enumerate(component.routes):
        mine[route[stage]].append(micro_batch)
    order: list[VirtualMicroBatch] = []
    for micro_batches in mine.values():
        left = [iter(micro_batches), iter(micro_batches)]
        for chunk in chain(warmup, [0, 1] * len(micro_batches)):
            order += [(micro_batch, chunk) for micro_batch in islice(left[chunk], 1)]
    return order


SCHEDULE = ZeroBubbleV()
