"""The models whose speed on one GPU is predicted and measured, as configurations with overrides.

GPT-2 with 163M parameters is that of configs/gpt2_163m.json: an untied head, and dropout of 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]

_ONE_GPU = ("parallel.tp_size=1", "parallel.dp_size=1", "parallel.sequence_parallel=false", "parallel.recompute=none")

WORKLOADS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "hlat_7b": (
            "configs/hlat_7b.json",
            (*_ONE_GPU, "batch.micro_batch_size=4", "batch.global_batch_size=4"),
        ),
        "llama_1.26b": (
            "configs/hlat_7b.json",
            (
                *_ONE_GPU,
                "model.hidden_size=2048",
                "model.intermediate_size=5632",
                "model.num_hidden_layers=22",
                "model.num_attention_heads=16",
                "model.num_key_value_heads=16",
                "batch.micro_batch_size=8",
                "batch.global_batch_size=8",
            ),
        ),
        "gpt2_124m": (
            "configs/gpt2_163m.json",
            (
                *_ONE_GPU,
                "model.tie_word_embeddings=true",
                "model.qkv_bias=true",
                "model.hidden_dropout=0.0",
                "precision.policy=bf16_sr",
                "batch.micro_batch_size=64",
                "batch.global_batch_size=64",
            ),
        ),
        "gpt2_163m": (
            "configs/gpt2_163m.json",
            (
                *_ONE_GPU,
                "precision.policy=bf16_sr",
                "optimizer.max_grad_norm=1.0",
                "batch.micro_batch_size=64",
                "batch.global_batch_size=64",
            ),
        ),
    }
)
"""File and overrides by name: one GPU, one micro-batch a step, nothing recomputed."""


def load_workload(name: str, overrides: Sequence[str] = ()) -> Config:
    """The resolved configuration of a workload; later overrides count."""
    file, own = WORKLOADS[name]
    path = ROOT / file
    return resolve(load_config(path, (*own, *overrides)), config_path=path)


_TINY = (
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "batch.sequence_length=32",
    "batch.micro_batch_size=2",
    "batch.global_batch_size=2",
)

SMOKE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hlat_7b": (*_TINY, "model.vocab_size=64", "model.num_key_value_heads=2"),
        "llama_1.26b": (*_TINY, "model.vocab_size=64", "model.num_key_value_heads=2"),
        "gpt2_124m": (*_TINY, "model.vocab_size=65", "model.max_position_embeddings=32"),
        "gpt2_163m": (*_TINY, "model.vocab_size=65", "model.max_position_embeddings=32"),
    }
)
"""Overrides that make a workload tiny, by name."""
