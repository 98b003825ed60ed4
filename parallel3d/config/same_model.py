"""Whether weights of one model are weights of another. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parallel3d.config.schema import ModelConfig

NON_WEIGHT_FIELDS = ("hidden_dropout", "initializer_range", "initializer_depth_scaling", "norm_backend")
"""Fields of the model that say nothing of its weights."""


def model_differences(model: ModelConfig, other: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """(field, value, other's value) of what keeps `other`'s weights from being weights of `model`; both resolved.

    Rotary positions have no weights: there the longest sequence is free.
    """
    free = (*NON_WEIGHT_FIELDS, *(["max_position_embeddings"] if model.architecture == "llama" else []))
    for field in ModelConfig.model_fields:
        value, other_value = getattr(model, field), getattr(other, field)
        if field not in free and value != other_value:
            yield field, value, other_value
