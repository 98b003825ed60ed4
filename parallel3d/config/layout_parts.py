"""The parts of a layout's name, such as `tp2.pp2.sp`: as data, for the parser of names and for help."""

from __future__ import annotations

from typing import Any

from parallel3d.pipeline.schedules import SCHEDULES

NAMED_PARTS: dict[str, tuple[str, Any]] = {
    "sp": ("sequence_parallel", True),
    "zero0": ("zero_stage", 0),
    "zero1": ("zero_stage", 1),
}
"""Parts without a number, and names of schedules: the field of section `parallel` and its value."""

LAYOUT_PARTS = (
    "parts joined by dots: tpN ppN dpN (dpN/N where stages differ) vN (virtual stages) "
    f"{' '.join([*NAMED_PARTS, *SCHEDULES])}"
)
"""A description, for help and errors."""
