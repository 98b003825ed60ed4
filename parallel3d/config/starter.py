"""A configuration to begin with for a model: sizes and rates that published runs of its size had. Pure.

    tokens of a step, learning rate   GPT-3's of the nearest size (Brown et al. 2020, table 2.1); at least 100 steps
    tokens                            those that are given, or 20 a parameter (Hoffmann et al. 2022)
    warmup, lowest rate               GPT-3's: 375 million tokens, at most a tenth of the run; a tenth of the peak
    sequence length                   the model's, at most 4,096 (HLAT's)

All else has the defaults of the sections. It is one process: a layout is what `parallel3d plan --search` finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from parallel3d.config.derived import num_parameters
from parallel3d.config.schema import ModelConfig

MAX_SEQUENCE = 4096
LEAST_STEPS = 100
WARMUP_TOKENS = 375_000_000
TOKENS_PER_PARAMETER = 20
POLICY = "bf16"


@dataclass(frozen=True, kw_only=True)
class PublishedSize:
    """A row of GPT-3's table."""

    num_parameters: float
    step_tokens: float
    learning_rate: float


GPT3_SIZES = tuple(
    PublishedSize(num_parameters=size, step_tokens=tokens * 2**20, learning_rate=rate)
    for size, tokens, rate in (  # 0.5M tokens are 256 sequences of 2,048
        (125e6, 0.5, 6e-4),
        (350e6, 0.5, 3e-4),
        (760e6, 0.5, 2.5e-4),
        (1.3e9, 1.0, 2e-4),
        (2.7e9, 1.0, 1.6e-4),
        (6.7e9, 2.0, 1.2e-4),
        (13e9, 2.0, 1e-4),
        (175e9, 3.2, 0.6e-4),
    )
)


def starter_config(
    model: ModelConfig,
    *,
    sources: Sequence[str] = (),
    num_tokens: int | None = None,
    weights: str | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """The JSON of a configuration that trains a resolved model on `sources`, for `num_tokens`."""
    size = nearest_size(num_parameters(model))
    num_tokens = num_tokens or TOKENS_PER_PARAMETER * num_parameters(model)
    length = min(model.max_position_embeddings or MAX_SEQUENCE, MAX_SEQUENCE)
    return {
        "model": {"architecture": model.architecture} | model.model_dump(exclude_defaults=True),
        "batch": {
            "global_batch_size": num_sequences(num_tokens, size.step_tokens, length),
            "micro_batch_size": 1,
            "sequence_length": length,
        },
        "precision": {"policy": POLICY},
        "optimizer": {"learning_rate": size.learning_rate},
        "lr_schedule": {
            "kind": "cosine",
            "warmup_tokens": max(1, min(WARMUP_TOKENS, num_tokens // 10)),
            "decay_tokens": num_tokens,
            "min_ratio": 0.1,
        },
        "data": {"sources": list(sources)} | ({"tokenizer": {"path": tokenizer}} if tokenizer else {}),
        "run": {"num_tokens": num_tokens} | ({"initialize_from": weights} if weights else {}),
    }


def nearest_size(parameters: int) -> PublishedSize:
    """The row of GPT-3's table with the smallest ratio to `parameters`."""
    return min(GPT3_SIZES, key=lambda size: abs(log(parameters / size.num_parameters)))


def num_sequences(num_tokens: int, step_tokens: float, length: int) -> int:
    """Sequences of a step: a power of two, which layouts divide."""
    wanted = min(step_tokens, num_tokens / LEAST_STEPS) / length
    return 1 << max(0, int(wanted).bit_length() - 1)
