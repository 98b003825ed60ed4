"""What ranks that share memory do with tensors, by loops in C (exchange_loops.c) where there are any.

Sums have the bits of torch.add.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from parallel3d.compiled_loops import call_loop, loop_library

_SOURCE = Path(__file__).with_suffix(".c")
_WITH_THREADS = "-fopenmp"
_LOOP_BYTES = 1 << 14
"""Smaller tensors are left to torch."""


def has_exchange_loops() -> bool:
    """Whether this machine has a C compiler with OpenMP; the first call compiles."""
    return loop_library(_SOURCE, _WITH_THREADS) is not None


def copy_for_peers(place: Tensor, tensor: Tensor) -> None:
    """Copies a tensor to a place that other processes read next; both contiguous, of one size and format, on a CPU."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes < _LOOP_BYTES or not _run("copy_for_peers", place, tensor, num_bytes):
        place.copy_(tensor)


def add(first: Tensor, second: Tensor, *, out: Tensor) -> Tensor:
    """torch.add of contiguous tensors of one size and format on a CPU; `out` may be one of them."""
    is_large = out.dtype is torch.bfloat16 and out.numel() * out.element_size() >= _LOOP_BYTES
    if not is_large or not _run("add_bf16", out, first, second, out.numel()):
        torch.add(first, second, out=out)
    return out


def _run(name: str, *arguments: Tensor | int) -> bool:
    library = loop_library(_SOURCE, _WITH_THREADS)
    if library is None:
        return False
    call_loop(library, name, *arguments, torch.get_num_threads())
    return True
