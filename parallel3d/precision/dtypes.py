"""torch's dtypes of the number formats (parallel3d/number_formats.py)."""

from __future__ import annotations

import torch

from parallel3d.number_formats import NUMBER_FORMATS, NumberFormat


def dtype_of(number_format: NumberFormat) -> torch.dtype:
    """torch's dtype of a number format."""
    dtype: torch.dtype = getattr(torch, number_format.torch_name)
    return dtype


FORMAT_OF: dict[torch.dtype, NumberFormat] = {dtype_of(each): each for each in NUMBER_FORMATS}
STORED_DTYPES: dict[str, torch.dtype] = {each.stored_name: dtype_of(each) for each in NUMBER_FORMATS}
"""By the format's name in safetensors files."""
