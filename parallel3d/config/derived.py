"""Sizes that follow from the configuration: pure arithmetic, exact integers.

Functions that need a resolved configuration (`load.resolve`) say so; the others take what they need.
"""

from __future__ import annotations

from parallel3d.config.schema import CheckpointConfig, Config, ModelConfig
from parallel3d.config.sections.batch import batch_sizes as batch_sizes
from parallel3d.config.sections.parallel import replicas_in_world as replicas_in_world
from parallel3d.families import FAMILIES
from parallel3d.families.spec import Family


def num_key_value_heads(model: ModelConfig) -> int:
    """Key-value heads: as many as query heads unless grouped."""
    return model.num_key_value_heads or model.num_attention_heads


def head_size(model: ModelConfig) -> int:
    """Width of one attention head."""
    return model.head_dim or model.hidden_size // model.num_attention_heads


def _has_usual_heads(model: ModelConfig) -> bool:
    return model.head_dim is None or model.head_dim * model.num_attention_heads == model.hidden_size


def query_size(model: ModelConfig) -> int:
    """Width of all queries of one token, and of the attention's result."""
    return model.num_attention_heads * head_size(model)


def key_value_size(model: ModelConfig) -> int:
    """Width of all keys, and of all values, of one token."""
    return num_key_value_heads(model) * head_size(model)


def family_of(model: ModelConfig) -> Family:
    """The row of the model's family."""
    return FAMILIES[model.architecture]


def has_qkv_bias(model: ModelConfig) -> bool:
    """Whether the query, key and value projections have biases."""
    return family_of(model).qkv_bias if model.qkv_bias is None else model.qkv_bias


def is_local(model: ModelConfig, layer: int) -> bool:
    """Whether layer `layer`, counted from 0, is one of the family's local ones."""
    family = family_of(model)
    if family.local_layers is None:
        return False
    name = family.local_layers.every_field
    return (layer + 1) % (getattr(model, name) or family.defaults[name]) != 0


def attention_window(model: ModelConfig, layer: int) -> int | None:
    """Keys that a query sees in a layer, its own included; None: all before it."""
    family = family_of(model)
    if family.window_field is None or (family.local_layers is not None and not is_local(model, layer)):
        return None
    return getattr(model, family.window_field)


def resolved_model(model: ModelConfig) -> ModelConfig:
    """The model with every null filled in that its family and its other fields decide. A head_dim that hidden_size and
    the heads imply is null, whether it was given or not."""
    return model.model_copy(
        update={
            "num_key_value_heads": num_key_value_heads(model),
            "head_dim": None if _has_usual_heads(model) else model.head_dim,
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
    attention = 2 * model.hidden_size * (query_size(model) + key_value_size(model))  # q and o, k and v
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
    """The norms of the layers and the last one; the biases of the linear layers."""
    family, hidden, sizes = family_of(model), model.hidden_size, _attention_sizes(model)
    norms = (family.num_layer_norms * model.num_hidden_layers + 1) * family.norm.num_vectors * hidden
    norms += model.num_hidden_layers * (family.qk_norm.num_weights(**sizes) if family.qk_norm else 0)
    qkv = query_size(model) + 2 * key_value_size(model) if has_qkv_bias(model) else 0
    output = hidden if family.output_bias else 0
    mlp = (family.mlp.num_matrices - 1) * model.intermediate_size + hidden if family.mlp.has_bias else 0
    return norms + model.num_hidden_layers * (qkv + output + mlp)


def _attention_sizes(model: ModelConfig) -> dict[str, int]:
    return dict(query_size=query_size(model), key_value_size=key_value_size(model), head_size=head_size(model))


def flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Floating-point operations to train on one token, forward and backward (PaLM, appendix B).

    6 for each matmul weight (2 forward, 4 backward), and 12 L s q for the attention scores and their sums, q the width
    of all queries, counted as
    if not causal: half of that is skipped by kernels that know the mask. A sliding window takes the place of s where it
    is shorter. Recomputed activations are not counted.
    """
    windows = (attention_window(model, layer) or sequence_length for layer in range(model.num_hidden_layers))
    attention = 12 * sum(min(sequence_length, window) for window in windows) * query_size(model)
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


def save_intervals(settings: CheckpointConfig) -> list[int]:
    """A save is due at each step that is a multiple of one of these."""
    return [steps for steps in (settings.every, settings.keep_every) if steps is not None]
