"""Whether one model can use the weights of another. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parallel3d.config.derived import family_of
from parallel3d.config.schema import ModelConfig

NON_WEIGHT_FIELDS = ("hidden_dropout", "initializer_range", "initializer_depth_scaling", "norm_backend")
"""Fields of the model that do not affect its weights."""


def model_differences(model: ModelConfig, other: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """(field, value, other's value) for each field that prevents `model` from using `other`'s weights; both resolved.

    Positions without weights leave the longest sequence free.
    """
    has_positions = family_of(model).positions.are_learned
    free = NON_WEIGHT_FIELDS if has_positions else (*NON_WEIGHT_FIELDS, "max_position_embeddings")
    for field in ModelConfig.model_fields:
        value, other_value = getattr(model, field), getattr(other, field)
        if field not in free and value != other_value:
            yield field, value, other_value
