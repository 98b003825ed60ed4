"""The gradient of an embedding as sums over segments: the tokens are sorted, a program adds up those of one id.

The rows of an id are added in the order of the tokens, `ROWS` sums side by side, in fp32, and reach the buffer with one
rounding. Ids that do not occur cost two loads.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel3d.kernels.triton_math import WIDE, wide_dtype

ROWS, BLOCK = 8, 256


def add_rows(launch, buffer, index, rows):
    """See `torch_embedding.py`."""
    rows, (num_ids, hidden) = rows.contiguous(), buffer.shape
    if num_ids == 0:
        return
    ids, order = torch.sort(index, stable=True)
    bounds = torch.searchsorted(ids, torch.arange(num_ids + 1, device=index.device))
    touched = buffer[: len(rows)]  # at most as many
    launch(
        _add_rows,
        (num_ids, triton.cdiv(hidden, BLOCK)),
        [buffer, rows, order, bounds],
        reads=[rows, order, bounds, touched],
        writes=[touched],
        WIDTH=hidden,
        ROWS=ROWS,
        BLOCK=BLOCK,
        WIDE=WIDE[wide_dtype(torch.promote_types(buffer.dtype, rows.dtype))],
        num_warps=4,
    )


@triton.jit
def _add_rows(
    buffer, rows, order, bounds, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """A part of the buffer's row of one id; its tokens are order[bounds[id]] to order[bounds[id + 1] - 1]."""
    number = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, end = tl.load(bounds + number), tl.load(bounds + number + 1)
    if first < end:
        total = tl.zeros([ROWS, BLOCK], dtype=WIDE)
        while first < end:
            at = first + tl.arange(0, ROWS)
            token = tl.load(order + at, mask=at < end, other=0)
            mask = (at < end)[:, None] & (column < WIDTH)[None, :]
            total += tl.load(rows + token[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(WIDE)
            first += ROWS
        target = buffer + number * WIDTH + column
        value = tl.load(target, mask=column < WIDTH, other=0.0).to(WIDE) + tl.sum(total, 0)
        tl.store(target, value.to(buffer.dtype.element_ty), mask=column < WIDTH)
