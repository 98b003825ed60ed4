"""Sums over rows, such as a bias' gradient: parts of fixed numbers of rows, and the parts' sum in order.

torch's own sum over a device's rows is cut by the number of its multiprocessors.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel3d.kernels.triton_math import WIDE, wide_dtype

PART_ROWS, ROWS, COLUMNS = 256, 16, 128
"""Rows of a part; tile that a program reads at once."""
SUM_ROWS, SUM_COLUMNS = 64, 32
"""Tile of the kernel that adds parts up."""


def sum_rows(launch, x, dtype):
    """x (rows, columns) -> (columns,) in fp32 or wider."""
    x, (num_rows, width) = x.contiguous(), x.shape
    wide, num_parts = wide_dtype(torch.promote_types(x.dtype, dtype)), triton.cdiv(num_rows, PART_ROWS)
    parts = torch.empty((num_parts, width), dtype=wide, device=x.device)
    launch(
        _sum_part,
        (num_parts, triton.cdiv(width, COLUMNS)),
        [x, parts, num_rows],
        reads=[x],
        writes=[parts],
        WIDTH=width,
        PART_ROWS=PART_ROWS,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        WIDE=WIDE[wide],
        num_warps=4,
    )
    return add_parts(launch, parts)


def add_parts(launch, parts):
    """parts (number, ...) -> their sum, in order."""
    num_parts, width = parts.shape[0], parts[0].numel()
    sums = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    launch(
        _sum_parts,
        (triton.cdiv(width, SUM_COLUMNS),),
        [parts, sums, num_parts],
        reads=[parts],
        writes=[sums],
        WIDTH=width,
        NUM_TILES=triton.next_power_of_2(triton.cdiv(num_parts, SUM_ROWS)),
        ROWS=SUM_ROWS,
        COLUMNS=SUM_COLUMNS,
        num_warps=4,
    )
    return sums


@triton.jit
def _sum_part(
    x,
    parts,
    num_rows,
    WIDTH: tl.constexpr,
    PART_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """COLUMNS columns of a part's sum."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    for first in range(0, PART_ROWS, ROWS):
        row = part * PART_ROWS + first + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(x + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(WIDE)
    tl.store(parts + part * WIDTH + column, tl.sum(total, 0), mask=column < WIDTH)


@triton.jit
def _sum_parts(
    parts,
    sums,
    num_parts,
    WIDTH: tl.constexpr,
    NUM_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of sums (WIDTH,) = the sum over parts (num_parts, WIDTH)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=sums.dtype.element_ty)
    for tile in range(NUM_TILES):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < num_parts)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(parts + row.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    tl.store(sums + column, tl.sum(total, 0), mask=column < WIDTH)
