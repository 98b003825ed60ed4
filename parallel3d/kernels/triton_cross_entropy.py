"""The cross-entropy over a sharded vocabulary, in two kernels around the group's reductions.

6 bytes move for a logit of bf16. The first kernel reads a row once: its largest logit and its exponentials' sum, in
blocks of one size whatever the vocabulary. The second overwrites the logits by their gradient.

Masks that end at a multiple of 8 leave loads whole. So rows with memory behind them, as a layer pads them on a GPU, are
read and written up to a multiple of ALIGNMENT.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel3d.kernels.triton_math import WIDE, warps_for, wide_dtype

ROW_BLOCK = 4096
"""Logits that a program of the first kernel reads at once, of one row after another block."""
BLOCK = 1024
ALIGNMENT = 64


def cross_entropy(launch, logits, local_targets, group, grad_factor, wide):
    """See `torch_cross_entropy.py`. What lies between the rows of `logits` is overwritten."""
    (num_rows, num_local), stride = logits.shape, logits.stride(0)
    padded = triton.cdiv(num_local, ALIGNMENT) * ALIGNMENT
    wide = wide_dtype(wide)
    largest = torch.full((num_rows, 1), float("-inf"), dtype=wide, device=logits.device)
    stats = torch.zeros((2, num_rows), dtype=wide, device=logits.device)
    constants = dict(NUM_LOGITS=num_local, LENGTH=padded if padded <= stride else num_local, WIDE=WIDE[wide])
    if num_local:
        launch(
            _statistics,
            (num_rows,),
            [logits, local_targets, largest, stats, num_rows, stride],
            reads=[logits, local_targets],
            writes=[largest, stats],
            BLOCK=ROW_BLOCK,
            num_warps=warps_for(ROW_BLOCK),
            **constants,
        )
    # a rank's statistics are relative to its own largest logit; its target's is 0 if another rank has it
    own = largest.squeeze(1).clone()
    group.all_reduce_max(largest)
    of_all = largest.squeeze(1)
    is_here = (local_targets >= 0) & (local_targets < num_local)
    stats[0] = torch.where(is_here, stats[0] - of_all, 0.0)
    stats[1] *= torch.exp(own - of_all)
    group.all_reduce(stats)
    losses = stats[1].log() - stats[0]
    if not grad_factor:
        return losses, None
    if num_local:
        launch(
            _gradient,
            (num_rows, triton.cdiv(num_local, BLOCK)),
            [logits, local_targets, largest, stats, num_rows, stride, grad_factor],
            reads=[logits, local_targets, largest, stats[1]],
            writes=[logits],
            BLOCK=BLOCK,
            num_warps=warps_for(BLOCK),
            **constants,
        )
    return losses, logits


@triton.jit
def _statistics(
    logits,
    targets,
    largest,
    stats,
    num_rows,
    stride,
    NUM_LOGITS: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Of one row: the largest logit; the target's logit, if it is here; the sum of exp(logit - largest)."""
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
    tl.store(largest + row, top)
    target = tl.load(targets + row)
    is_here = (target >= 0) & (target < NUM_LOGITS)
    tl.store(stats + row, tl.load(start + target, mask=is_here, other=0.0).to(WIDE))
    tl.store(stats + num_rows + row, tl.sum(total, 0))


@triton.jit
def _gradient(
    logits,
    targets,
    largest,
    stats,
    num_rows,
    stride,
    factor,
    NUM_LOGITS: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A part of a row: logits = (softmax - one_hot) * factor."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < LENGTH
    at = logits + row * stride + column
    top, total = tl.load(largest + row), tl.load(stats + num_rows + row)
    value = tl.load(at, mask=mask, other=0.0).to(WIDE)
    share = tl.exp(value - top) / total
    share = tl.where(column == tl.load(targets + row), share - 1.0, share) * factor
    tl.store(at, share.to(logits.dtype.element_ty), mask=mask)
