"""The memory of a rank of each stage, before anything is rented. Pure.

State is counted from the plan of the buckets (state_bytes.py). What is kept for backward passes is that of the plan
checker (`trainer/message_sizes.py`) times what the schedule holds. On top comes the one layer, or block of logits, that
is computed at the peak::

    the layer at work      the gradient of its output, that of its MLP: of [gate | up], of the product's input and that
                           input again, 4 f numbers a token (GELU 3 f, on a CPU f); and all that it recomputes
    the head at work       a block of logits; the final norm's sum and result, the gradient of the latter

with the intermediate size f divided over the tensor-parallel ranks. tests/costs compares all of it with rehearsed steps
on meta tensors and with runs whose ranks are threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel3d.config.derived import family_of, head_size, key_value_size, query_size
from parallel3d.config.schema import Config
from parallel3d.config.specs.policies import POLICY_SPECS
from parallel3d.costs.layered_parameters import LayeredParameters
from parallel3d.costs.pipeline_facts import pipeline_facts
from parallel3d.costs.state_bytes import Holders, StateBytes, count_state
from parallel3d.pipeline.check import MessageSizes
from parallel3d.rehearsal.device_rows import GIB
from parallel3d.rehearsal.ideal_counts import HEAD_BLOCK_BYTES
from parallel3d.rehearsal.roofline import RESERVED_GIB
from parallel3d.trainer.message_sizes import estimate_message_sizes
from parallel3d.trainer.plans import chunk_layout_of, split_layers

FRAGMENTATION = 0.05
"""Of what comes and goes within a step: memory that the allocator has and can't use. An assumption."""
CPU_LOGITS_BYTES, CPU_LOGITS_TOKENS = 8 << 20, 256
"""Of logits at once on a CPU, or this number of tokens if their gradients fit; on a device HEAD_BLOCK_BYTES."""
CPU_LOGIT_GRADS_BYTES = 64 << 20
"""Of their gradients, for one product for the weight."""
MEASURE_BYTES = 6
"""An element of narrow moments, while their norms are measured: in fp32, and once more in its own format."""
MEASURE_BLOCK = 1 << 24
"""Elements that are measured at once."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The bytes of one rank of a stage at the peak of a step."""

    stage: int
    layers: tuple[range, ...]
    """Of each of its chunks."""
    state: StateBytes
    activations: int
    """Kept for backward passes, of all micro-batches in flight, and what the layer at work needs."""
    logits: int
    """What the head needs above the layer at work."""
    buffers: int
    """Messages between stages, tables of rotary positions."""
    context: int
    """What is neither a tensor nor the allocator's: the device's context, workspaces of libraries."""
    fragmentation: int

    @property
    def total(self) -> int:
        return self.state.total + self.activations + self.logits + self.buffers + self.context + self.fragmentation

    @property
    def tensors(self) -> int:
        """Bytes of tensors alone."""
        return self.total - self.context - self.fragmentation


@dataclass(frozen=True, kw_only=True)
class MicroBatchSizes:
    """One micro-batch on one rank, in elements or bytes."""

    num_tokens: int
    local_tokens: int
    """Tokens that this rank has between the layers."""
    itemsize: int
    on_device: bool
    messages: MessageSizes

    @staticmethod
    def of(config: Config, partition: Sequence[range], *, on_device: bool) -> MicroBatchSizes:
        parallel, batch = config.parallel, config.batch
        assert batch.micro_batch_size is not None
        num_tokens = batch.micro_batch_size * batch.sequence_length
        device = "cuda" if on_device else "cpu"
        placed = config.model_copy(update={"run": config.run.model_copy(update={"device": device})})
        return MicroBatchSizes(
            num_tokens=num_tokens,
            local_tokens=num_tokens // parallel.tp_size if parallel.sequence_parallel else num_tokens,
            itemsize=POLICY_SPECS[config.precision.policy].compute.num_bytes,
            on_device=on_device,
            messages=estimate_message_sizes(placed, tuple(partition)),
        )

    @property
    def gathered_tokens(self) -> int:
        """Tokens of tensors that exist both sharded and whole; 0 where tokens are not sharded."""
        return self.num_tokens if self.local_tokens < self.num_tokens else 0


def estimate_memory(
    config: Config, parts: LayeredParameters, *, on_device: bool = True, only: Sequence[int] | None = None
) -> tuple[StageMemory, ...]:
    """The memory of a rank of each stage (or of those of `only`) of a resolved configuration."""
    partition, layout = split_layers(config), chunk_layout_of(config)
    sizes = MicroBatchSizes.of(config, partition, on_device=on_device)
    return tuple(
        _stage_memory(config, parts, stage, [partition[k] for k in layout.virtual_stages[stage]], sizes)
        for stage in (only if only is not None else range(config.parallel.pp_size))
    )


def _stage_memory(
    config: Config, parts: LayeredParameters, stage: int, chunks: Sequence[range], sizes: MicroBatchSizes
) -> StageMemory:
    model = config.model
    state = state_of(config, parts, stage, chunks)
    working = layer_at_work(config, sizes)
    is_last = any(chunk.stop == model.num_hidden_layers for chunk in chunks)
    head = head_at_work(config, sizes) if is_last else 0
    stash, num_messages = stashed_bytes(config, sizes, stage, chunks)
    buffers = num_messages * sizes.messages.activation_bytes + rotary_bytes(config)
    activations = max(stash + working, updating_bytes(config, state, on_device=sizes.on_device))
    logits = max(0, stash + head - activations)
    passing = activations + logits + buffers
    return StageMemory(
        stage=stage,
        layers=tuple(chunks),
        state=state,
        activations=activations,
        logits=logits,
        buffers=buffers,
        context=int(RESERVED_GIB * GIB) if sizes.on_device else 0,
        fragmentation=int(FRAGMENTATION * passing) if sizes.on_device else 0,
    )


def state_of(config: Config, parts: LayeredParameters, stage: int, chunks: Sequence[range]) -> StateBytes:
    """Counts what a rank of a stage keeps between steps."""
    parallel, holders = config.parallel, holders_of(config, stage)
    others = (config.optimizer.kind, config.optimizer.decay_norms_and_biases, parallel.bucket_mib)
    key = (parallel.tp_size, parallel.sequence_parallel, holders, config.precision.model_dump_json(), *others)
    return parts.remember(chunks, key, lambda: count_state(parts.of_stage(chunks), config, holders, parallel.tp_size))


def holders_of(config: Config, stage: int) -> Holders:
    """How many ranks share the state of a stage's parameters."""
    replicas = [config.parallel.dp_size or 1] * config.parallel.pp_size
    if config.parallel.stage_replicas is not None:
        replicas = list(config.parallel.stage_replicas)
    if config.parallel.zero_stage == 0:
        return Holders(stage=1, tied=1, has_backup=False)
    ends = chunk_layout_of(config).embedding_stages
    widest = [max(each, config.elastic.max_replicas or 0) for each in replicas]
    return Holders(
        stage=replicas[stage],
        tied=sum(replicas[end] for end in ends),
        has_backup=config.elastic.zero_backups > 0 and replicas[stage] > 1,
        most_stage=widest[stage],
        most_tied=sum(widest[end] for end in ends),
    )


def stashed_bytes(config: Config, sizes: MicroBatchSizes, stage: int, chunks: Sequence[range]) -> tuple[int, int]:
    """The bytes that a stage keeps for backward passes at most, and the number of messages that it holds."""
    parallel, layout, messages = config.parallel, chunk_layout_of(config), sizes.messages
    virtual_stages = layout.virtual_stages[stage]
    kept = max(messages.stash_bytes[k] for k in virtual_stages)
    deferred = max(messages.deferred_bytes[k] for k in virtual_stages)
    facts = pipeline_facts(
        parallel.schedule,
        parallel.pp_size,
        parallel.virtual_stages,
        micro_batches_a_replica(config),
        round(deferred / kept, 3),
    )
    mean = sum(messages.stash_bytes[k] for k in virtual_stages) / len(virtual_stages)
    return round(facts.stashed[stage] * mean), facts.num_messages


def micro_batches_a_replica(config: Config) -> int:
    """The most micro-batches of a step that one replica computes."""
    assert config.batch.num_micro_batches is not None
    narrowest = min(config.parallel.stage_replicas or [config.parallel.dp_size or 1])
    return -(-config.batch.num_micro_batches // narrowest)


def layer_at_work(config: Config, sizes: MicroBatchSizes) -> int:
    """Bytes that the backward pass of one layer needs beyond what was kept."""
    model, parallel, family = config.model, config.parallel, family_of(config.model)
    tp, mlp_width = parallel.tp_size, model.intermediate_size // parallel.tp_size
    keeps_activation = family.mlp.num_matrices == 2 and not sizes.on_device  # GELU on a CPU
    hidden = model.hidden_size * (sizes.local_tokens + sizes.gathered_tokens)
    hidden += model.hidden_size * sizes.local_tokens if family.norms_outputs or model.hidden_dropout else 0
    mlp = 4 if family.mlp.num_matrices > 2 else 1 if keeps_activation else 3
    numbers = hidden + mlp * mlp_width * sizes.num_tokens
    again = 0
    if parallel.recompute != "none":
        again = recomputed_bytes(config, sizes)
        numbers += mlp_width * sizes.num_tokens if keeps_activation else 0
    overwrites = family.positions.are_learned or family.qk_norm is not None
    if parallel.recompute == "selective" and not overwrites:  # rotated apart from what is kept
        numbers += (query_size(model) // tp + max(key_value_size(model) // tp, head_size(model))) * sizes.num_tokens
    return numbers * sizes.itemsize + again


def recomputed_bytes(config: Config, sizes: MicroBatchSizes) -> int:
    """What one layer keeps without recomputation and does not keep with it."""
    one = (range(1),)
    modes = []
    for mode in ("none", config.parallel.recompute):
        changed = config.model_copy(update={"parallel": config.parallel.model_copy(update={"recompute": mode})})
        modes.append(MicroBatchSizes.of(changed, one, on_device=sizes.on_device).messages.stash_bytes[0])
    return modes[0] - modes[1]


def head_at_work(config: Config, sizes: MicroBatchSizes) -> int:
    """Bytes of the head's forward pass, in which its gradients are computed too."""
    vocab = -(-config.model.vocab_size // config.parallel.tp_size)
    spec = POLICY_SPECS[config.precision.policy]
    if sizes.on_device:
        rows = max(1, HEAD_BLOCK_BYTES // (vocab * sizes.itemsize))
        logits = min(rows, sizes.num_tokens) * vocab * sizes.itemsize
    else:
        row_bytes = vocab * sizes.itemsize
        rows = max(1, min(CPU_LOGITS_TOKENS, CPU_LOGIT_GRADS_BYTES // row_bytes), CPU_LOGITS_BYTES // row_bytes)
        all_rows = rows * max(1, CPU_LOGIT_GRADS_BYTES // (row_bytes * rows))
        logits = min(all_rows, sizes.num_tokens) * row_bytes
        logits += min(rows, sizes.num_tokens) * vocab * spec.keep_fp32.num_bytes
    hidden = 3 * sizes.local_tokens + 2 * sizes.gathered_tokens
    return logits + hidden * config.model.hidden_size * sizes.itemsize


def rotary_bytes(config: Config) -> int:
    """Bytes of the table of cosines and sines that all layers share."""
    if family_of(config.model).positions.are_learned:
        return 0
    wide = POLICY_SPECS[config.precision.policy].keep_fp32.num_bytes
    return config.batch.sequence_length * head_size(config.model) * wide


def updating_bytes(config: Config, state: StateBytes, *, on_device: bool) -> int:
    """Bytes for narrow states: as they are measured before the first step, or by torch's operators rounded in each; no
    activations exist then."""
    spec = POLICY_SPECS[config.precision.policy]
    if not spec.has_narrow_moments:
        return 0
    measured = MEASURE_BYTES * min(MEASURE_BLOCK, state.longest_range)
    return measured if on_device or not spec.rounds_stochastically else max(measured, state.rounding)
