"""Sizes that follow from the configuration: pure arithmetic, exact integers.

Functions that need a resolved configuration (`load.resolve`) say so; the others take what they need.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.config.schema import CheckpointConfig, Config, LossScaleConfig, ModelConfig
from parallel3d.config.sections.batch import batch_sizes as batch_sizes
from parallel3d.config.sections.parallel import replicas_in_world as replicas_in_world
from parallel3d.config.specs.policies import POLICY_SPECS
from parallel3d.config.specs.update_rules import has_exp_avg_sq
from parallel3d.config.warmup_builder import run_length, warmup_warnings
from parallel3d.families import FAMILIES
from parallel3d.families.spec import Family
from parallel3d.pipeline.schedules import SCHEDULES

RARE_SHARE = 0.1
"""Of a blend's source that may be meant otherwise."""


def num_key_value_heads(model: ModelConfig) -> int:
    """Key-value heads: as many as query heads unless grouped."""
    return model.num_key_value_heads or model.num_attention_heads


def head_size(model: ModelConfig) -> int:
    """Width of one attention head."""
    return model.hidden_size // model.num_attention_heads


def key_value_size(model: ModelConfig) -> int:
    """Width of all keys, and of all values, of one token."""
    return num_key_value_heads(model) * head_size(model)


def family_of(model: ModelConfig) -> Family:
    """The row of the model's family."""
    return FAMILIES[model.architecture]


def has_qkv_bias(model: ModelConfig) -> bool:
    """Whether the query, key and value projections have biases."""
    return family_of(model).qkv_bias if model.qkv_bias is None else model.qkv_bias


def attention_window(model: ModelConfig) -> int | None:
    """Keys that a query sees, its own included; None: all before it."""
    field = family_of(model).window_field
    return None if field is None else getattr(model, field)


def resolved_model(model: ModelConfig) -> ModelConfig:
    """The model with every null filled in that its family and its other fields decide."""
    return model.model_copy(
        update={
            "num_key_value_heads": num_key_value_heads(model),
            "qkv_bias": has_qkv_bias(model),
            **{name: default for name, default in family_of(model).defaults.items() if getattr(model, name) is None},
        }
    )


def num_mlp_matrices(model: ModelConfig) -> int:
    """Weights of hidden_size x intermediate_size in a layer's MLP."""
    return family_of(model).mlp.num_matrices


def num_parameters(model: ModelConfig) -> int:
    """All parameters, a tied embedding once: linear weights, embeddings, norms and biases; learned positions need
    max_position_embeddings resolved."""
    embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    return num_matmul_parameters(model) + embedding + _num_positions(model) + _num_norm_and_bias_parameters(model)


def num_matmul_parameters(model: ModelConfig) -> int:
    """Weights that multiply every token: attention, MLP and output head, tied or not, without the embedding's lookup
    and norms."""
    attention = 2 * model.hidden_size * (model.hidden_size + key_value_size(model))  # q and o, k and v
    mlp = num_mlp_matrices(model) * model.hidden_size * model.intermediate_size
    head = model.vocab_size * model.hidden_size
    return model.num_hidden_layers * (attention + mlp) + head


def _num_positions(model: ModelConfig) -> int:
    """Parameters of the learned positions."""
    if not family_of(model).positions.are_learned:
        return 0
    assert model.max_position_embeddings is not None, "needs a resolved configuration"
    return model.max_position_embeddings * model.hidden_size


def _num_norm_and_bias_parameters(model: ModelConfig) -> int:
    """Two norms a layer and the last one; the biases of the linear layers."""
    family, hidden = family_of(model), model.hidden_size
    norms = (2 * model.num_hidden_layers + 1) * family.norm.num_vectors * hidden
    qkv = hidden + 2 * key_value_size(model) if has_qkv_bias(model) else 0
    output = hidden if family.output_bias else 0
    mlp = (family.mlp.num_matrices - 1) * model.intermediate_size + hidden if family.mlp.has_bias else 0
    return norms + model.num_hidden_layers * (qkv + output + mlp)


def flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Floating-point operations to train on one token, forward and backward (PaLM, appendix B).

    6 for each matmul weight (2 forward, 4 backward), and 12 L s h for the attention scores and their sums, counted as
    if not causal: half of that is skipped by kernels that know the mask. A sliding window takes the place of s where it
    is shorter. Recomputed activations are not counted.
    """
    num_keys = min(sequence_length, attention_window(model) or sequence_length)
    attention = 12 * model.num_hidden_layers * num_keys * model.hidden_size
    return 6 * num_matmul_parameters(model) + attention


def tokens_per_step(config: Config) -> int:
    """Tokens of one iteration over all replicas."""
    return batch_sizes(config.batch)[0] * config.batch.sequence_length


def stage_replicas(config: Config) -> tuple[int, ...]:
    """Replicas of each stage, by stage; of a resolved configuration."""
    return replicas_in_world(config.parallel, None)


def world_size(config: Config) -> int:
    """Ranks that the layout has places for; of a resolved configuration."""
    return sum(stage_replicas(config)) * config.parallel.tp_size


def warnings(config: Config) -> list[str]:
    """What is allowed but hardly meant, one sentence each; of a resolved configuration."""
    parallel, replicas, policy = config.parallel, stage_replicas(config), POLICY_SPECS[config.precision.policy]
    num_micro_batches = batch_sizes(config.batch)[2]
    lr_schedule, whole = config.lr_schedule, run_length(config)
    if lr_schedule.decay_tokens is None:
        unit, decay_end, run_end = "steps", lr_schedule.decay_steps or whole.num_steps, whole.num_steps
    else:
        unit, decay_end, run_end = "tokens", lr_schedule.decay_tokens, whole.num_tokens
    schedule, replica_micro_batches = SCHEDULES[parallel.schedule], num_micro_batches / max(replicas)
    bubble = schedule.bubble(parallel.pp_size, parallel.virtual_stages, replica_micro_batches)
    uneven = sorted({count for count in replicas if num_micro_batches % count})
    checks = (
        (
            bubble > 0.5,
            f"pipeline stages idle for {bubble:.0%} of a step, at {replica_micro_batches:g} micro-batches"
            f" a replica: raise batch.num_micro_batches or lower parallel.pp_size",
        ),
        (
            bool(uneven),
            f"{num_micro_batches} micro-batches do not divide evenly over {uneven} replicas: some wait for the others",
        ),
        (
            not schedule.suits(parallel.pp_size, replica_micro_batches),
            f"stages idle a little longer than they need with parallel.schedule {schedule.name}: it is made for"
            f" {schedule.suitable_micro_batches}, and parallel.pp_size = {parallel.pp_size} stages get"
            f" {replica_micro_batches:g}",
        ),
        (
            parallel.sequence_parallel and parallel.tp_size == 1,
            "parallel.sequence_parallel has no effect at parallel.tp_size 1",
        ),
        (
            config.run.compile == "elementwise"
            and not any(block.is_compiled for block in family_of(config.model).blocks),
            f'run.compile "elementwise" has no effect on {config.model.architecture}, whose norms and activations are'
            " kernels already",
        ),
        (
            lr_schedule.kind != "constant" and decay_end < 0.8 * run_end,
            f"the learning rate stays at its lowest from {decay_end:,} {unit} of {run_end:,} on"
            f" (lr_schedule.decay_{unit})",
        ),
        (
            lr_schedule.warmup_steps >= whole.num_steps,
            f"the run ends within its warmup of {lr_schedule.warmup_steps:,} updates (lr_schedule.warmup_steps)",
        ),
        (
            (lr_schedule.warmup_tokens or 0) >= whole.num_tokens,
            f"the run ends within its warmup of {lr_schedule.warmup_tokens or 0:,} tokens (lr_schedule.warmup_tokens)",
        ),
        (
            config.elastic.enabled and not config.elastic.zero_backups and parallel.zero_stage and max(replicas) > 1,
            "without backups (elastic.zero_backups 0) the loss of any worker loses its part of the optimizer's state"
            " and ends the run",
        ),
        (
            config.elastic.enabled and min(replicas) == 1 and max(replicas) > 1,
            f"stages {[stage for stage, count in enumerate(replicas) if count == 1]} have one replica each: the loss of"
            " one of their workers ends the run",
        ),
        (
            config.run.initialize_from is not None
            and (config.data.tokenizer.path, config.data.tokenizer.kind) == (None, "sentencepiece"),
            "run.initialize_from brings weights that know the tokens of another tokenizer, and the corpus has one of"
            " its own: set data.tokenizer.path to the tokenizer.model that belongs to them",
        ),
        (
            not policy.scales_loss and config.precision.loss_scale != LossScaleConfig(),
            f"precision.loss_scale has no effect on policy {config.precision.policy}",
        ),
        (
            policy.has_narrow_moments
            and has_exp_avg_sq(config.optimizer.kind)
            and (config.optimizer.beta2 or 0.0) >= 0.99,
            f"optimizer.beta2 {config.optimizer.beta2} with moments in 16 bits: the second moment follows a spike of"
            " the gradient too slowly (HLAT was unstable at 0.99, not at 0.95)",
        ),
        (
            config.data.slice is not None and config.data.num_processes > 0,
            "data.num_processes has no effect on data.slice: its tokens are ready",
        ),
        *warmup_warnings(config),
    )
    return [*(sentence for applies, sentence in checks if applies), *_rare_sources(config)]


def save_intervals(settings: CheckpointConfig) -> list[int]:
    """A save is due at each step that is a multiple of one of these."""
    return [steps for steps in (settings.every, settings.keep_every) if steps is not None]


def _rare_sources(config: Config) -> Iterator[str]:
    """Sources of which a step sees little or, in most steps, nothing."""
    for number, stage in enumerate(config.data.blend.stages if config.data.blend else ()):
        for name, weight in stage.weights.items():
            share = weight / sum(stage.weights.values())
            if 0 < share < RARE_SHARE:
                sequences = share * batch_sizes(config.batch)[0]
                yield f"stage {number} of data.blend has {share:.3g} of {name!r}: {sequences:.2g} sequences a step"
