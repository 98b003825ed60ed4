"""Sums over ranges on a device: each over fixed blocks, and these again, until one number is left.

The order follows from the number of elements alone. Blocks are added up in fp32, their sums in fp64.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel3d.kernels.launch_kernel import Launch

BLOCK = 4096
"""Elements of a program."""


def squared_norms(launch: Launch, parts: Sequence[Tensor]) -> Tensor:
    """The squared norm of all `parts`, (n,) of one format up to fp32, in one number: (1,) fp64."""
    return _reduce(launch, torch.cat([_square_sums(launch, part) for part in parts]).unsqueeze(0), max_row=-1).view(-1)


def add_norms(launch: Launch, partials: Sequence[Tensor]) -> Tensor:
    """Combines what updates have measured, (3, programs) fp32 each: (3,) fp64, of which the last is a maximum."""
    return _reduce(launch, torch.cat(list(partials), dim=1), max_row=2).view(-1)


def _square_sums(launch: Launch, values: Tensor) -> Tensor:
    """Sums of squares of blocks of `values` (n,): (blocks,) fp32."""
    num_blocks = triton.cdiv(len(values), BLOCK)
    sums = torch.empty(num_blocks, dtype=torch.float32, device=values.device)
    if num_blocks:
        launch(
            _square_sums_of_blocks,
            (num_blocks,),
            (values, sums, len(values)),
            reads=(values,),
            writes=(sums,),
            BLOCK=BLOCK,
            num_warps=4,
        )
    return sums


def _reduce(launch: Launch, rows: Tensor, *, max_row: int) -> Tensor:
    """Reduces each of `rows` (num_rows, n) to (num_rows, 1) fp64: its sum; of the row `max_row` the maximum."""
    if not rows.shape[1]:
        return rows.new_zeros((len(rows), 1), dtype=torch.float64)
    while rows.shape[1] > 1 or rows.dtype != torch.float64:
        num_blocks = triton.cdiv(rows.shape[1], BLOCK)
        reduced = torch.empty((len(rows), num_blocks), dtype=torch.float64, device=rows.device)
        launch(
            _reduce_blocks,
            (num_blocks, len(rows)),
            (rows, reduced, rows.shape[1]),
            reads=(rows,),
            writes=(reduced,),
            MAX_ROW=max_row,
            BLOCK=BLOCK,
            num_warps=4,
        )
        rows = reduced
    return rows


@triton.jit
def _square_sums_of_blocks(values, sums, n, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(sums + block, tl.sum(value * value))


@triton.jit
def _reduce_blocks(rows, reduced, n, MAX_ROW: tl.constexpr, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(rows + row.to(tl.int64) * n + at, mask=at < n, other=0.0).to(tl.float64)  # all are >= 0
    total = tl.sum(value)
    if MAX_ROW >= 0:
        total = tl.where(row == MAX_ROW, tl.max(value), total)
    tl.store(reduced + row * tl.num_programs(0) + block, total)
