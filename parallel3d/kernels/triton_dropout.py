"""Dropout by keys in one kernel: what is kept for the backward pass are the keys alone. Bitwise the torch form."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel3d.kernels.triton_math import WIDE, warps_for, wide_dtype
from parallel3d.kernels.triton_random import random_words
from parallel3d.parallel.staged_group import to_device
from parallel3d.random_keys import drop_threshold

BLOCK = 1024


def drop(launch, x, mask):
    """The second result is the table of keys (sequences, 2) on the device."""
    keys = to_device(torch.tensor([(key.first, key.second) for key in mask.keys], dtype=torch.int64), x.device)
    return drop_grad(launch, x, mask, keys), keys


def drop_grad(launch, grad, mask, keys):
    grad, (num_local, hidden) = grad.contiguous(), grad.shape
    result = torch.empty_like(grad)
    launch(
        _drop,
        (num_local, triton.cdiv(hidden, BLOCK)),
        [grad, keys, result, mask.first_token, mask.sequence_length],
        reads=[grad, keys],
        writes=[result],
        THRESHOLD=drop_threshold(mask.probability),
        SCALE=mask.scale,
        WIDTH=hidden,
        BLOCK=BLOCK,
        WIDE=WIDE[wide_dtype(grad.dtype)],
        num_warps=warps_for(BLOCK),
    )
    return result


@triton.jit
def _drop(
    x,
    keys,
    result,
    first_token,
    sequence_length,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A part of one token: x * kept * SCALE."""
    row = tl.program_id(0).to(tl.int64)
    token = row + first_token
    sequence, position = token // sequence_length, token % sequence_length
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    words = random_words(position * WIDTH + column, tl.load(keys + 2 * sequence), tl.load(keys + 2 * sequence + 1))
    kept = (words & 0xFFFFFFFF) >= THRESHOLD
    at = row * WIDTH + column
    # by a product, as in torch: a dropped infinity becomes NaN, a negative number -0
    value = tl.load(x + at, mask=mask, other=0.0).to(WIDE) * kept.to(WIDE) * SCALE
    tl.store(result + at, value.to(result.dtype.element_ty), mask=mask)
