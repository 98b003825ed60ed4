"""How Triton forms start their kernels: through a function that they are given, so that a rehearsal can count."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol

from torch import Tensor

from parallel3d.accelerator import MetaAccelerator, accelerator_of


class Launch(Protocol):
    """Starts one kernel, or on meta tensors counts that it would be started."""

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Sequence[object],
        *,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        **options: object,
    ) -> None:
        """`kernel` (a triton.jit function) on `grid` programs with positional `arguments`; `options` are constants and
        launch options. `reads` and `writes` are the tensors, or the parts of them, that it moves through memory."""
        ...


_ONE_AT_A_TIME = Lock()  # the interpreter's state is the process's; on a GPU it costs nothing beside a launch


def launch_triton(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[object],
    *,
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
    **options: object,
) -> None:
    """A `Launch` that runs the kernel on the current device, or in Triton's interpreter; of meta tensors it reports the
    start to the rehearsal."""
    if writes[0].is_meta:
        meta = accelerator_of(writes[0].device)
        assert isinstance(meta, MetaAccelerator)
        meta.on_kernel(kernel.fn.__name__, reads, writes)
        return
    with _ONE_AT_A_TIME:
        kernel[grid](*arguments, **options)
