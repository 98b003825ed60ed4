"""Stochastic rounding of float32 to bfloat16 with given noise.

bf16 is the upper half of fp32's bits. A number between two bf16 neighbours goes to the upper one with the probability
of its distance from the lower one, so that the expected result is the number itself (HLAT, section III-D; Gupta et al.
2015, "Deep learning with limited numerical precision")::

    sign, exponent, 7 bits | 16 bits that bf16 has not
                           + 16 bits of noise          -> a carry rounds away from zero, then the 16 bits go

All of it is integer arithmetic on the bits, so that it is right for every exponent (where the neighbours' distance
doubles, too), for subnormals whatever the processor does with them, and for both signs. What bf16 has, zeros and
infinities included, stays as it is; a NaN becomes the quiet NaN. Numbers beyond the largest bf16 have 2**128 as their
upper neighbour, which is infinity: an overflow shows, as it does with rounding to the nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOISE_BITS = 16
_NAN = 0x7FC0


def round_to_bf16(x: Tensor, noise: Tensor) -> Tensor:
    """`x` float32 rounded to bf16 with `noise`, int32 in 0..65535 of the same shape: 0 truncates."""
    upper = x.view(torch.int32).add(noise).bitwise_right_shift_(NOISE_BITS).masked_fill_(x.isnan(), _NAN)
    return upper.to(torch.int16).view(torch.bfloat16)


def noise_of(words: Tensor, part: int) -> Tensor:
    """16 bits (part 0 to 3) of each of the random `words`, int64: int32 in 0..65535 of the same shape."""
    return words.bitwise_right_shift(NOISE_BITS * part).to(torch.int32).bitwise_and_(0xFFFF)
