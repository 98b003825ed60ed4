"""What all parts of the configuration have in common; schema.py puts them together."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A share in [0, 1)."""


class Section(BaseModel):
    """Strict, closed and frozen."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
