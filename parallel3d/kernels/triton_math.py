"""What Triton's kernels share: formats, block sizes, and functions of single numbers."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}
"""Triton's name of the formats that kernels compute in."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The format in which a kernel computes on elements of `dtype`: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def row_block(width: int) -> int:
    """The block that holds a row."""
    return max(16, triton.next_power_of_2(width))


def warps_for(block: int) -> int:
    """Warps for a block of elements: 8 for each thread, which bf16 loads as one vector of 16 bytes."""
    return min(32, max(1, block // 256))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow's NaN: exp(-x) = inf gives 0."""
    return 1.0 / (1.0 + tl.exp(-x))
