"""A kernel around the functions for random numbers, for their test."""

import triton
import triton.language as tl

from parallel3d.kernels.triton_random import random_words, round_stochastically


@triton.jit
def round_all(x, index, words, result, n, first, second, PART: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    drawn = random_words(tl.load(index + at, mask=mask, other=0), first, second)
    tl.store(words + at, drawn.to(tl.int64, bitcast=True), mask=mask)
    value = tl.load(x + at, mask=mask, other=0.0)
    tl.store(result + at, round_stochastically(value, drawn, PART), mask=mask)
