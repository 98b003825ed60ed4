"""The update of one range of a bucket as one kernel: widens, applies the rule's formula, rounds, stores and measures.

Each element is read and written once: 14 bytes for AdamW on bf16 weights, moments and gradients. A rule's formula is a
function of fp32 values in a file of its own (`optim/update_rules/triton_*.py`). Results have the bits of the torch form
(`optim/updater.py`): every operation is one of IEEE 754, and none is fused with another.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel3d.kernels import update_table
from parallel3d.kernels.launch_kernel import Launch
from parallel3d.kernels.triton_random import random_words, round_stochastically, round_to_nearest, widen
from parallel3d.kernels.update_table import UpdateTable

_ALIGNMENT = tl.constexpr(update_table.ALIGNMENT)
_COLUMNS = tl.constexpr(update_table.COLUMNS)


def update_range(
    launch: Launch,
    formula: object,
    numbers: Sequence[float],
    tensors: tuple[Tensor, Tensor, Tensor],
    table: UpdateTable,
    *,
    grad_scale: float,
    rounding: str,
    copy: Tensor | None = None,
    variance: int | None = None,
    measures: bool = False,
) -> Tensor | None:
    """Updates weights (n,) and states (num_states, n), of one format, by gradients (n,) of any: `tensors`, contiguous.

    `formula` and `numbers` are the rule's, for gradients that were multiplied by `grad_scale`. `rounding` to bf16 is
    "stochastic" or "nearest"; "none" is for fp32 weights, of which `copy` (n,) gets the nearest bf16 values. Elements
    that `table` leaves out stay as they are. With `measures` returns (3, programs) fp32, of the stored values that the
    table counts: sums of squared weights; of the state `variance`, sums of roots, and the largest root.
    """
    weights, states, grads = tensors
    partials = torch.empty((3, table.num_programs if measures else 0), dtype=torch.float32, device=weights.device)
    copy_to = weights if copy is None else copy
    if table.num_programs:
        launch(
            _update_range,
            (table.num_programs,),
            (weights, states, grads, copy_to, partials, table.rows, states.shape[1], grad_scale, tuple(numbers)),
            reads=(weights, states, grads, table.rows[: table.num_pieces]),
            writes=(weights, states, partials, *([] if copy is None else [copy])),
            FORMULA=formula,
            NUM_STATES=len(states),
            ROUNDING=rounding,
            COPIES=copy is not None,
            MEASURES=measures,
            VARIANCE=-1 if variance is None else variance,
            **table.constants,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return partials if measures else None


@triton.jit
def _global_index(piece, tile, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The global indices (BLOCK,) int64 of the elements from `tile` on, by the row `piece` of the table."""
    origin = tl.load(piece + 3)
    shift = tl.load(piece + 6)
    lane = tl.arange(0, BLOCK)
    if HAS_ROWS:
        width = tl.load(piece + 4)
        stride = tl.load(piece + 5)
        row = (tile - origin) // width
        column = (tile - origin - row * width).to(tl.int32) + lane
        more_rows = column // width.to(tl.int32)
        column -= more_rows * width.to(tl.int32)
        return row * stride + shift + more_rows.to(tl.int64) * stride + column.to(tl.int64)
    else:
        return tile - origin + shift + lane.to(tl.int64)


@triton.jit
def _store(pointer, value, words, part: tl.constexpr, mask, ROUNDING: tl.constexpr):
    """Stores `value` (fp32) in the pointer's format; returns what was stored, in fp32."""
    if ROUNDING == "stochastic":
        rounded = round_stochastically(value, words, part)
    elif ROUNDING == "nearest":
        rounded = round_to_nearest(value)
    else:
        rounded = value
    tl.store(pointer, rounded, mask=mask)
    return widen(rounded)


@triton.jit
def _measure(weight, root, counted, output):
    """Writes a program's three partial results to its place in `output` (3, programs)."""
    tl.store(output, tl.sum(tl.where(counted, weight * weight, 0.0)))
    root = tl.where(counted, root, 0.0)
    tl.store(output + tl.num_programs(0), tl.sum(root))
    tl.store(output + 2 * tl.num_programs(0), tl.max(root))


# fmt: off
@triton.jit
def _update_range(
    weights, states, grads, copy, partials, table, row_length, grad_scale, numbers,
    FORMULA: tl.constexpr, NUM_STATES: tl.constexpr, ROUNDING: tl.constexpr, COPIES: tl.constexpr,
    MEASURES: tl.constexpr, VARIANCE: tl.constexpr, NUM_ROWS: tl.constexpr, IS_ALIGNED: tl.constexpr,
    HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: on
    program = tl.program_id(0)
    firsts = tl.load(table + tl.arange(0, NUM_ROWS) * _COLUMNS)
    piece = table + (tl.sum((firsts <= program).to(tl.int32)) - 1) * _COLUMNS
    start, stop = tl.load(piece + 1), tl.load(piece + 2)
    if IS_ALIGNED:  # else masks are not constant over a vector, and each element is moved by itself
        start, stop = tl.multiple_of(start, _ALIGNMENT), tl.multiple_of(stop, _ALIGNMENT)
    tile = start // _ALIGNMENT * _ALIGNMENT + (program - tl.load(piece)) * BLOCK
    at = tl.multiple_of(tile, _ALIGNMENT) + tl.arange(0, BLOCK)
    mask = at < stop
    if not IS_ALIGNED:
        mask = mask & (at >= start)
    words = at
    if ROUNDING == "stochastic":
        words = random_words(_global_index(piece, tile, HAS_ROWS, BLOCK), tl.load(piece + 8), tl.load(piece + 9))
    weight = widen(tl.load(weights + at, mask=mask, other=0.0))
    grad = widen(tl.load(grads + at, mask=mask, other=0.0)) * grad_scale
    values, place = (), at
    for _ in tl.static_range(NUM_STATES):
        values = values + (widen(tl.load(states + place, mask=mask, other=0.0)),)
        place += row_length
    weight, values = FORMULA(weight, values, grad, numbers)
    weight = _store(weights + at, weight, words, 0, mask, ROUNDING)
    root, place = tl.zeros((BLOCK,), tl.float32), at
    for number in tl.static_range(NUM_STATES):
        stored = _store(states + place, values[number], words, number + 1, mask, ROUNDING)
        place += row_length
        if number == VARIANCE:
            root = tl.sqrt(stored)
    if COPIES:
        tl.store(copy + at, round_to_nearest(weight), mask=mask)
    if MEASURES:
        _measure(weight, root, mask & (tl.load(piece + 7) != 0), partials + program)
