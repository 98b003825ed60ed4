"""Common ground of all sections of the configuration; schema.py assembles them."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A share in [0, 1)."""


class Section(BaseModel):
    """A group of fields: strictly typed, frozen, unknown fields refused."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def expand_home(path: str) -> str:
    """`path` with a leading ~ replaced by the home folder."""
    return os.path.expanduser(path)  # Path.expanduser raises on an unknown ~user
