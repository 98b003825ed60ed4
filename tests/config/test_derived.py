"""Derived sizes: the published parameter counts and counts by hand."""

from __future__ import annotations

from typing import Any

import pytest

from parallel3d.config import derived
from parallel3d.config.schema import BatchConfig, Config, ModelConfig

HLAT_7B = ModelConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
)
HLAT_70B = ModelConfig(
    vocab_size=32000,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)


def config(**sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": HLAT_7B.model_dump(),
        "batch": {"global_batch_size": 8, "micro_batch_size": 1, "sequence_length": 16},
        "optimizer": {"learning_rate": 1e-3},
        "run": {"num_steps": 100},
    }
    return Config.model_validate({name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})


def test_hlat_parameter_counts():
    assert derived.num_parameters(HLAT_7B) == 6_738_415_616
    assert derived.num_parameters(HLAT_70B) == 68_976_648_192


def test_counts_by_hand():
    model = ModelConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    per_layer = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 12  # q k v o, gate up down
    assert derived.head_size(model) == 2
    assert derived.num_matmul_parameters(model) == 3 * per_layer + 10 * 8
    assert derived.num_parameters(model) == 3 * (per_layer + 2 * 8) + 2 * 10 * 8 + 8
    assert derived.flops_per_token(model, 5) == 6 * (3 * per_layer + 80) + 12 * 3 * 5 * 8
    assert derived.num_key_value_heads(HLAT_7B) == 32


def test_a_tied_embedding_is_counted_once_and_its_head_multiplies_all_the_same():
    tied = HLAT_7B.model_copy(update={"tie_word_embeddings": True})
    assert derived.num_parameters(tied) == 6_738_415_616 - 32000 * 4096
    assert derived.num_matmul_parameters(tied) == derived.num_matmul_parameters(HLAT_7B)


def test_counts_of_gpt2_by_hand():
    model = ModelConfig(
        architecture="gpt2",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=7,
    )
    weights = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 2 * 8 * 12  # q k v o, up down
    norms_and_biases = 2 * 2 * 8 + (8 + 4 + 4) + 8 + 12 + 8  # two norms, q k v, o, up, down
    assert derived.num_matmul_parameters(model) == 3 * weights + 10 * 8
    assert derived.num_parameters(model) == 3 * (weights + norms_and_biases) + (2 * 10 + 7) * 8 + 2 * 8
    without = model.model_copy(update={"qkv_bias": False})
    assert derived.num_parameters(model) - derived.num_parameters(without) == 3 * (8 + 4 + 4)


def test_counts_of_wide_heads_and_of_windows_in_some_layers_by_hand():
    model = ModelConfig(
        architecture="gemma3",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        tie_word_embeddings=True,
        sliding_window=3,
        sliding_window_pattern=2,
    )
    weights = 8 * 24 + 2 * 8 * 12 + 24 * 8 + 3 * 8 * 12  # q, k and v, o, gate up down
    assert derived.num_matmul_parameters(model) == 3 * weights + 10 * 8
    assert derived.num_parameters(model) == 3 * (weights + 4 * 8 + 2 * 6) + 10 * 8 + 8
    assert [derived.attention_window(model, layer) for layer in range(3)] == [3, None, 3]
    assert derived.flops_per_token(model, 5) == 6 * (3 * weights + 80) + 12 * (3 + 5 + 3) * 24


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"global_batch_size": 12, "micro_batch_size": 3}, (12, 3, 4)),
        ({"global_batch_size": 12, "num_micro_batches": 3}, (12, 4, 3)),
        ({"micro_batch_size": 3, "num_micro_batches": 5}, (15, 3, 5)),
        ({"global_batch_size": 12, "micro_batch_size": 3, "num_micro_batches": 4}, (12, 3, 4)),
    ],
)
def test_batch_sizes(given: dict[str, int], expected: tuple[int, int, int]):
    assert derived.batch_sizes(BatchConfig(sequence_length=4, **given)) == expected


def test_layout_and_tokens():
    uniform = config(parallel={"tp_size": 2, "pp_size": 2, "dp_size": 3})
    assert derived.stage_replicas(uniform) == (3, 3)
    assert derived.world_size(uniform) == 12
    assert derived.tokens_per_step(uniform) == 8 * 16
    uneven = config(parallel={"tp_size": 2, "pp_size": 3, "stage_replicas": [1, 3, 2]})
    assert derived.stage_replicas(uneven) == (1, 3, 2)
    assert derived.world_size(uneven) == 12
