"""One layout on rented devices: does it fit, how long is a step, what does training cost. Pure.

    step = m t + idle (mean t) + messages on the longest path through the pipeline, or that outlast its passes
           + what of the reduction nothing hides + update + entry

with m micro-batches of the narrowest stage, t the seconds of the slowest stage for one (its products, attention,
elementwise kernels and tensor-parallel collectives), and idle from the schedule's own simulation. **Predicted**: no
line of it was measured on a cluster.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import log2

from parallel3d.config.derived import flops_per_token, tokens_per_step
from parallel3d.config.schema import Config
from parallel3d.costs.communication import (
    NO_TRAFFIC,
    AxisTraffic,
    LayerTraffic,
    layer_traffic,
    message_seconds,
    replica_traffic,
)
from parallel3d.costs.layered_parameters import LayeredParameters
from parallel3d.costs.machines import Machines
from parallel3d.costs.pipeline_facts import PipelineFacts, pipeline_facts
from parallel3d.costs.rank_memory import MicroBatchSizes, StageMemory, estimate_memory, micro_batches_a_replica
from parallel3d.costs.rental import Rental
from parallel3d.costs.stage_work import pass_seconds, update_seconds
from parallel3d.pipeline.chunk_layout import ChunkLayout
from parallel3d.rehearsal.device_rows import GIB, peak_flops
from parallel3d.trainer.plans import chunk_layout_of, split_layers

ENTRY_HOP_S = 50e-6
"""Of the tree that sums an iteration's entry, for each doubling of the ranks. A guess."""


@dataclass(frozen=True, kw_only=True)
class LayoutEstimate:
    """A configuration on machines."""

    config: Config
    machines: Machines
    stages: tuple[StageMemory, ...]
    stage_s: tuple[float, ...]
    """Seconds of one micro-batch on each stage, forward and backward, with its tensor-parallel collectives."""
    facts: PipelineFacts
    num_micro_batches: int
    """Of one replica."""
    update_s: float
    traffic: dict[str, AxisTraffic]

    @cached_property
    def worst(self) -> StageMemory:
        """The stage whose ranks need most memory."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        return self.worst.total <= self.machines.device.memory_gib * GIB

    @property
    def idle_s(self) -> float:
        """Time that the slowest stage waits for others, and for messages from them."""
        messages = self.traffic["pp"]
        return self.facts.idle * sum(self.stage_s) / len(self.stage_s) + messages.chain_s + messages.exposed_s

    @property
    def bubble(self) -> float:
        return self.idle_s / (self.idle_s + self.num_micro_batches * max(self.stage_s))

    @property
    def entry_s(self) -> float:
        """Time between steps: the entry, agreed by all ranks, and what the host does."""
        return self.machines.device.rates.step_idle_s + ENTRY_HOP_S * log2(max(2, self.machines.num_devices))

    @cached_property
    def step_s(self) -> float:
        busy_s = self.num_micro_batches * max(self.stage_s)
        return busy_s + self.idle_s + self.traffic["dp"].exposed_s + self.update_s + self.entry_s

    @property
    def tokens_per_s(self) -> float:
        return tokens_per_step(self.config) / self.step_s

    @property
    def mfu(self) -> float:
        flops = self.tokens_per_s * flops_per_token(self.config.model, self.config.batch.sequence_length)
        return flops / (self.machines.num_devices * peak_flops(self.machines.device, 2))

    def rental(self, num_tokens: float) -> Rental:
        """The time and the money for these tokens."""
        return Rental(
            price_per_hour=self.machines.price_per_hour, tokens_per_s=self.tokens_per_s, num_tokens=num_tokens
        )


def estimate_layout(
    config: Config, parts: LayeredParameters, machines: Machines, stages: tuple[StageMemory, ...] = ()
) -> LayoutEstimate:
    """The estimate for a resolved configuration whose ranks are the machines' devices; `stages` is its memory, if it is
    known."""
    parallel = config.parallel
    on_device = not machines.device.is_cpu
    stages = stages or estimate_memory(config, parts, on_device=on_device)
    sizes = MicroBatchSizes.of(config, split_layers(config), on_device=on_device)
    count = micro_batches_a_replica(config)
    works = {(w.num_layers, w.is_first, w.is_last): w for w in _stage_works(config, stages)}
    timed = {key: _time_stage(config, sizes, machines, work) for key, work in works.items()}
    each = [timed[work.num_layers, work.is_first, work.is_last] for work in _stage_works(config, stages)]
    slowest_s = max(stage.total_s for stage in each)
    facts = pipeline_facts(parallel.schedule, parallel.pp_size, parallel.virtual_stages, count)
    return LayoutEstimate(
        config=config,
        machines=machines,
        stages=stages,
        stage_s=tuple(stage.total_s for stage in each),
        facts=facts,
        num_micro_batches=count,
        update_s=max(stage.update_s for stage in each),
        traffic={
            "tp": max((_tp_traffic(s.layer, s.num_layers * count) for s in each), key=lambda axis: axis.total_s),
            "pp": _messages(config, sizes, machines, facts, count=count, stage_s=slowest_s),
            "dp": max((stage.reduced for stage in each), key=lambda axis: (axis.exposed_s, axis.total_s)),
        },
    )


@dataclass(frozen=True, kw_only=True)
class _StageWork:
    """The layers of a stage, and what else it computes."""

    memory: StageMemory
    num_layers: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class _TimedStage:
    """Seconds of a stage for one micro-batch, and of its part of the step's end."""

    num_layers: int
    total_s: float
    update_s: float
    layer: LayerTraffic
    reduced: AxisTraffic


def _stage_works(config: Config, stages: tuple[StageMemory, ...]) -> list[_StageWork]:
    layout = chunk_layout_of(config)
    return [
        _StageWork(
            memory=memory,
            num_layers=sum(map(len, memory.layers)),
            is_first=memory.stage == layout.first_stage,
            is_last=memory.stage == layout.last_stage,
        )
        for memory in stages
    ]


def _time_stage(config: Config, sizes: MicroBatchSizes, machines: Machines, work: _StageWork) -> _TimedStage:
    passes = pass_seconds(config, sizes, machines.device, work.num_layers, is_first=work.is_first, is_last=work.is_last)
    layer = layer_traffic(config, sizes, machines, passes)
    forward_s = passes.forward + work.num_layers * layer.forward_s
    backward_s = passes.backward + work.num_layers * layer.backward_s
    return _TimedStage(
        num_layers=work.num_layers,
        total_s=forward_s + backward_s,
        update_s=update_seconds(config, work.memory.state, machines.device),
        layer=layer,
        reduced=replica_traffic(config, work.memory, machines, forward_s=forward_s, backward_s=backward_s),
    )


def _messages(
    config: Config, sizes: MicroBatchSizes, machines: Machines, facts: PipelineFacts, *, count: int, stage_s: float
) -> AxisTraffic:
    """The messages between stages: those of the rank that sends most, and those for which the step waits.

    The step waits for the messages on its longest path, which ranks of all stages send one after the other, however few
    one of them sends: pp - 1 activations that fill the pipeline, pp - 1 gradients that drain it, and what the schedule
    has between (`PipelineFacts.chain_length`). A rank sends while it computes: its own messages add to that only as far
    as they outlast its passes by more than the path waits between.
    """
    parallel = config.parallel
    if parallel.pp_size == 1:
        return NO_TRAFFIC
    message_s, bandwidth = message_seconds(config, sizes, machines)
    num_messages = count * _messages_of_busiest_rank(chunk_layout_of(config))
    total_s, chain_s = num_messages * message_s, facts.chain_length * message_s
    ends_s, outlasting_s = 2 * (parallel.pp_size - 1) * message_s, max(0.0, total_s - count * stage_s)
    return AxisTraffic(
        num_bytes=num_messages * sizes.messages.activation_bytes,
        total_s=total_s,
        exposed_s=max(0.0, ends_s + outlasting_s - chain_s),
        bandwidth=bandwidth,
        chain_s=chain_s,
        chain_length=facts.chain_length,
    )


def _messages_of_busiest_rank(layout: ChunkLayout) -> int:
    """Activations and gradients that a rank sends for one micro-batch, at most: one each for every border between its
    virtual stages and those of another rank."""
    sent = Counter[int]()
    for earlier, later in zip(layout.stages, layout.stages[1:]):
        if earlier != later:
            sent.update((earlier, later))  # an activation, a gradient
    return max(sent.values())


def _tp_traffic(layer: LayerTraffic, times: int) -> AxisTraffic:
    return AxisTraffic(
        num_bytes=layer.num_bytes * times,
        total_s=layer.total_s * times,
        exposed_s=(layer.forward_s + layer.backward_s) * times,
        bandwidth=layer.bandwidth,
    )
