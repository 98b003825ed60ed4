"""The cross-entropy over a sharded vocabulary, in kernels around the group's reductions.

6 bytes move for a logit of bf16. The first kernel reads a row once: its largest logit and its exponentials' sum, in
blocks of one size whatever the vocabulary. The last overwrites the logits by their gradient; one between has a few
numbers of each row.

Masks that end at a multiple of 8 leave loads whole. So rows with memory behind them, as a layer pads them on a GPU, are
read and written up to a multiple of LOGITS_ALIGNMENT.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel3d.kernels.torch_cross_entropy import LOGITS_ALIGNMENT
from parallel3d.kernels.triton_math import WIDE, warps_for, wide_dtype

ROW_BLOCK = 4096
"""Logits that a program of the first kernel reads at once, of one row after another block."""
BLOCK = 1024


def cross_entropy(launch, logits, local_targets, group, grad_factor, wide):
    """See `torch_cross_entropy.py`. What lies between the rows of `logits` is overwritten."""
    (num_rows, num_local), stride = logits.shape, logits.stride(0)
    padded = triton.cdiv(num_local, LOGITS_ALIGNMENT) * LOGITS_ALIGNMENT
    wide = wide_dtype(wide)
    # by row: the largest logit of all ranks, that of this rank, the target's logit, the sum of exponentials
    numbers = torch.empty((4, num_rows), dtype=wide, device=logits.device)
    losses = torch.empty(num_rows, dtype=wide, device=logits.device)
    constants = dict(NUM_LOGITS=num_local, LENGTH=padded if padded <= stride else num_local, WIDE=WIDE[wide])
    launch(
        _statistics,
        (num_rows,),
        [logits, local_targets, numbers, num_rows, stride],
        reads=[logits, local_targets],
        writes=[numbers],
        BLOCK=ROW_BLOCK,
        num_warps=warps_for(ROW_BLOCK),
        **constants,
    )
    group.all_reduce_max(numbers[0])
    launch(
        _relate,
        (triton.cdiv(num_rows, BLOCK),),
        [local_targets, numbers, num_rows],
        reads=[local_targets, numbers],
        writes=[numbers[2:]],
        NUM_LOGITS=num_local,
        BLOCK=BLOCK,
        num_warps=warps_for(BLOCK),
    )
    group.all_reduce(numbers[2:])
    launch(
        _gradient,
        (num_rows, triton.cdiv(max(1, num_local), BLOCK) if grad_factor else 1),
        [logits, local_targets, numbers, losses, num_rows, stride, grad_factor or 0.0],
        reads=[logits, local_targets, numbers] if grad_factor else [numbers],
        writes=[logits, losses] if grad_factor else [losses],
        HAS_GRADIENT=bool(grad_factor),
        BLOCK=BLOCK,
        num_warps=warps_for(BLOCK),
        **constants,
    )
    return losses


@triton.jit
def _statistics(
    logits,
    targets,
    numbers,
    num_rows,
    stride,
    NUM_LOGITS: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Of one row: the largest logit, twice; the target's logit, if it is here; the sum of exp(logit - largest)."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    top = tl.full([], -float("inf"), dtype=WIDE)
    total = tl.zeros([BLOCK], dtype=WIDE)
    for first in range(0, LENGTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(start + column, mask=column < LENGTH, other=0.0).to(WIDE)
        value = tl.where(column < NUM_LOGITS, value, -float("inf"))
        higher = tl.maximum(top, tl.max(value, 0))
        total = total * tl.exp(top - higher) + tl.exp(value - higher)
        top = higher
    target = tl.load(targets + row)
    is_here = (target >= 0) & (target < NUM_LOGITS)
    tl.store(numbers + row, top)
    tl.store(numbers + num_rows + row, top)
    tl.store(numbers + 2 * num_rows + row, tl.load(start + target, mask=is_here, other=0.0).to(WIDE))
    tl.store(numbers + 3 * num_rows + row, tl.sum(total, 0))


@triton.jit
def _relate(targets, numbers, num_rows, NUM_LOGITS: tl.constexpr, BLOCK: tl.constexpr):
    """Of BLOCK rows: the target's logit (0 if not here) and the sum, relative to the largest logit of all ranks."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    of_all = tl.load(numbers + row, mask=mask, other=0.0)
    own = tl.load(numbers + num_rows + row, mask=mask, other=0.0)
    target = tl.load(targets + row, mask=mask, other=-1)
    is_here = (target >= 0) & (target < NUM_LOGITS)
    at = numbers + 2 * num_rows + row
    tl.store(at, tl.where(is_here, tl.load(at, mask=mask, other=0.0) - of_all, 0.0), mask=mask)
    at += num_rows
    tl.store(at, tl.load(at, mask=mask, other=0.0) * tl.exp(own - of_all), mask=mask)


@triton.jit
def _gradient(
    logits,
    targets,
    numbers,
    losses,
    num_rows,
    stride,
    factor,
    HAS_GRADIENT: tl.constexpr,
    NUM_LOGITS: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A part of a row: logits = (softmax - one_hot) * factor; the first part's program stores the row's loss."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(numbers + 3 * num_rows + row)
    if tl.program_id(1) == 0:
        tl.store(losses + row, tl.log(total) - tl.load(numbers + 2 * num_rows + row))
    if HAS_GRADIENT:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < LENGTH
        at = logits + row * stride + column
        value = tl.load(at, mask=mask, other=0.0).to(WIDE)
        share = tl.exp(value - tl.load(numbers + row)) / total
        share = tl.where(column == tl.load(targets + row), share - 1.0, share) * factor
        tl.store(at, share.to(logits.dtype.element_ty), mask=mask)
