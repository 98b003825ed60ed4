"""Stochastic rounding of float32 to bfloat16 with given noise.

bf16 is the upper half of fp32's bits. A number between two bf16 neighbours goes to the upper one with the probability
of its distance from the lower one, so that the expected result is the number itself (HLAT, section III-D; Gupta et al.
2015, "Deep learning with limited numerical precision")::

    sign, exponent, 7 bits | 16 bits that bf16 lacks
                           + 16 bits of noise          -> a carry rounds away from zero; the 16 bits are dropped

All of it is integer arithmetic on the bits, so it is right for every exponent (also where the distance of neighbours
doubles), for subnormals on any processor, and for both signs. Values that bf16 can represent, zeros and infinities
included, stay as they are; a NaN becomes the quiet NaN. Numbers beyond the largest bf16 have 2**128 as their upper
neighbour, which is infinity: an overflow shows, as with rounding to the nearest.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan

import torch
from torch import Tensor

from parallel3d.accelerator import blocks_of, is_accelerator
from parallel3d.compiled_loops import run_loop

Noise = Callable[[range], Tensor]
"""Returns 64 random bits, int64 (elements,), for each element of a range of a flat tensor."""

NOISE_BITS = 16
_BLOCK = 1 << 16
_NAN = 0x7FC0


def round_to_bf16(x: Tensor, noise: Tensor) -> Tensor:
    """`x` float32 rounded to bf16 with `noise`, int32 in 0..65535 of the same shape: 0 truncates. The definition."""
    upper = x.view(torch.int32).add(noise).bitwise_right_shift_(NOISE_BITS)
    if _may_have_nan(x):
        upper.masked_fill_(x.isnan(), _NAN)
    return upper.to(torch.int16).view(torch.bfloat16)


def round_by_words(x: Tensor, words: Tensor, part: int, out: Tensor | None = None) -> Tensor:
    """`x` float32 rounded to bf16, in `out` if it is given, with 16 bits (part 0 to 3) of each of the random `words`
    int64 of the same shape."""
    if x.device.type == "cpu":
        result = torch.empty(x.shape, dtype=torch.bfloat16) if out is None else out
        tensors = (result, x.contiguous(), words.contiguous())
        if result.is_contiguous() and run_loop("round_to_bf16", *tensors, x.numel(), NOISE_BITS * part):
            return result
    rounded = round_to_bf16(x, noise_of(words, part))
    return rounded if out is None else out.copy_(rounded)


def _may_have_nan(x: Tensor) -> bool:
    """False if no element is NaN, by the sum of all on a CPU, which takes a tenth of a check of each; always True on a
    device, which would have to be waited for."""
    return is_accelerator(x.device) or isnan(x.sum().item())


def noise_of(words: Tensor, part: int) -> Tensor:
    """16 bits (part 0 to 3) of each of the random `words`, int64: int32 in 0..65535 of the same shape."""
    return words.bitwise_right_shift(NOISE_BITS * part).to(torch.int32).bitwise_and_(0xFFFF)


def add_rounded(total: Tensor, term: Tensor, noise: Noise) -> None:
    """Adds `term` (n,) float32 to `total` (n,) bf16, rounded, and zeroes it."""
    for span in blocks_of(total, _BLOCK):
        part = slice(span.start, span.stop)
        total[part] = round_by_words(total[part].float() + term[part], noise(span), 0)
    term.zero_()


def round_in_place(term: Tensor, noise: Noise) -> None:
    """Rounds each element of `term` (n,) float32 to one of its bf16 neighbours, in place."""
    for span in blocks_of(term, _BLOCK):
        part = slice(span.start, span.stop)
        term[part] = round_by_words(term[part], noise(span), 0).float()
