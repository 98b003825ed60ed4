"""Random bits within Triton's kernels: `random_keys.bits` and the rounding of `precision/stochastic_rounding.py`."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from parallel3d import random_keys

_GAMMA = tl.constexpr(random_keys.GAMMA)
_MIX_1 = tl.constexpr(random_keys.MIX_1)
_MIX_2 = tl.constexpr(random_keys.MIX_2)


@triton.jit
def random_words(index, first, second):
    """64 random bits (uint64) for each element of `index` (int64), by the two int64 words of a key."""
    x = index.to(tl.uint64) * _GAMMA + first.to(tl.uint64)
    x = (x ^ (x >> 30)) * _MIX_1
    x = x ^ second.to(tl.uint64)
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def round_stochastically(value, words, part: tl.constexpr):
    """`value` (fp32) rounded to bf16 by 16 bits, number `part`, of the random `words`; NaN becomes the quiet NaN."""
    noise = ((words >> (16 * part)) & 0xFFFF).to(tl.uint32)
    upper = (value.to(tl.uint32, bitcast=True) + noise) >> 16
    return tl.where(value != value, 0x7FC0, upper).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to_nearest(value):
    """`value` (fp32) rounded to the nearest bf16, ties to the even one; NaN becomes the quiet NaN."""
    pattern = value.to(tl.uint32, bitcast=True)
    upper = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
    return tl.where(value != value, 0x7FC0, upper).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def widen(value):
    """`value` in fp32. bf16 by its bits: Triton's interpreter converts subnormal numbers wrongly."""
    if value.dtype == tl.bfloat16:
        return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)
