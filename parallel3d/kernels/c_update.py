"""The update of one range of a bucket as one loop in C, for CPUs: `triton_update.py` describes it, with the same bits.

A rule's formula is a C file of its own (`optim/update_rules/c_*.c`), compiled when it is first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.kernels.c_loops import is_narrow, run_loop_of
from parallel3d.kernels.update_table import UpdateTable

_NO_STATE = -1


def update_range(
    formula: Path,
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
    """As the Triton form, but that `formula` is the rule's C file."""
    weights, states, grads = tensors
    assert is_narrow(weights) == (rounding != "none") and weights.dtype is states.dtype
    partials = torch.zeros((3, table.num_programs), dtype=torch.float32) if measures else None
    run_loop_of(
        formula,
        "update_range",
        *(weights, states, grads, copy, partials),
        *(table.rows, table.num_pieces, table.num_programs, table.block),
        states.shape[1],
        torch.tensor(numbers, dtype=torch.float32),
        grad_scale,
        _NO_STATE if variance is None else variance,
        *(is_narrow(weights), is_narrow(grads), int(rounding == "stochastic")),
    )
    return partials


def add_norms(partials: Sequence[Tensor]) -> Tensor:
    """Combines what updates have measured, (3, programs) fp32 each: (3,) fp64, of which the last is a maximum."""
    squares, roots, largest = torch.cat(list(partials), dim=1).double()
    return torch.stack([squares.sum(), roots.sum(), largest.max() if len(largest) else largest.sum()])
