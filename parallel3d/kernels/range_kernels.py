"""Functions of whole ranges for the optimizer: the update in one kernel, and norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parallel3d.kernels import c_update
from parallel3d.kernels.choice import KernelForm
from parallel3d.kernels.launch_kernel import Launch


@dataclass(frozen=True, kw_only=True)
class RangeKernels:
    """One form of these functions; triton_update.py and triton_sums.py describe them."""

    form: KernelForm = "torch"
    squared_norms: Callable[[Sequence[Tensor]], Tensor]
    """(any number,) fp64, whose sum is the squared norm of some tensors (n,) of one format."""
    update_range: Callable[..., Tensor | None] | None = None
    """None: the rule's formula is applied block by block (`optim/updater.py`)."""
    add_norms: Callable[[Sequence[Tensor]], Tensor] | None = None
    """(3,) fp64 from what updates have measured."""


def squared_norms(parts: Sequence[Tensor]) -> Tensor:
    """The squared norm of each of `parts`: (parts,) fp64, of norms in fp32 or wider."""
    if not parts:
        return torch.zeros(0, dtype=torch.float64)
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    return torch.stack([torch.linalg.vector_norm(part, dtype=wide).double() for part in parts]).square()


TORCH_RANGE_KERNELS = RangeKernels(squared_norms=squared_norms)
C_RANGE_KERNELS = RangeKernels(
    form="c",
    squared_norms=squared_norms,
    update_range=c_update.update_range,
    add_norms=c_update.add_norms,
)


def triton_range_kernels(launch: Launch) -> RangeKernels:
    """The Triton forms, whose kernels `launch` starts."""
    from parallel3d.kernels import triton_sums, triton_update

    def norms(parts: Sequence[Tensor]) -> Tensor:
        is_wide = not parts or parts[0].dtype == torch.float64
        return squared_norms(parts) if is_wide else triton_sums.squared_norms(launch, parts)

    return RangeKernels(
        form="triton",
        squared_norms=norms,
        update_range=partial(triton_update.update_range, launch),
        add_norms=partial(triton_sums.add_norms, launch),
    )


def range_kernels(form: KernelForm, launch: Launch) -> RangeKernels:
    """The functions in a form; `launch` starts Triton's."""
    if form == "triton":
        return triton_range_kernels(launch)
    return C_RANGE_KERNELS if form == "c" else TORCH_RANGE_KERNELS
