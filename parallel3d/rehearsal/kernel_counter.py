"""Counts the kernels, bytes and FLOPs of work on meta tensors.

Operators of torch are seen by a dispatch mode, each one that is not a view as one kernel; Triton kernels report
themselves with the tensors that they move (kernels/launch_kernel.py). Bytes are those of the operands and the results,
as if nothing stayed in a cache. torch has no fused attention for meta tensors, so that of CUDA is put in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel3d.accelerator import MetaAccelerator, accelerator_of
from parallel3d.rehearsal.kernel_counts import KernelCounts, KernelWork, WorkKind

_aten = torch.ops.aten
_PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm"})
_OVERWRITES = frozenset({"copy_", "zero_", "fill_", "normal_", "uniform_"})
"""In-place operators that do not read what they overwrite."""
_READS_PART = frozenset({"index", "embedding", "gather", "index_select"})
"""Operators that read as many elements of their first operand as they return."""
_ALLOCATES = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view"})
_KERNELS_OF = {"embedding_dense_backward": 4}
"""Operators that start several kernels: a sort, and sums of its runs."""
_ALIGNMENT = 16


class KernelCounter:
    """Adds up what happens within `counting`, by the label that is set at that time."""

    def __init__(self) -> None:
        self.counts: dict[str, KernelCounts] = {}
        self.label = ""

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts this thread's work on meta tensors, autograd's included."""
        meta = accelerator_of(torch.device("meta"))
        assert isinstance(meta, MetaAccelerator)
        with ExitStack() as stack:
            meta.on_wait, meta.on_kernel = self._add_wait, self._add_kernel
            stack.callback(meta.reset)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(_attention_of_cuda())
            stack.enter_context(_OperatorMode(self))
            yield

    def add(self, work: KernelWork, count: int = 1) -> None:
        """Counts a kernel."""
        self._of_label().works[work] += count

    def _add_wait(self) -> None:
        self.counts[self.label] = self._of_label() + KernelCounts(num_waits=1)

    def _add_kernel(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self.add(KernelWork(name=name, kind="elementwise", num_bytes=_bytes_of([*reads, *writes])))

    def _of_label(self) -> KernelCounts:
        return self.counts.setdefault(self.label, KernelCounts(works=Counter()))


class _OperatorMode(TorchDispatchMode):
    def __init__(self, counter: KernelCounter):
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _ALLOCATES and not _is_view(func):
            inputs, outputs = _meta_tensors((args, kwargs)), _meta_tensors(result)
            if inputs or outputs:
                self._counter.add(_work_of(name, func, args, kwargs or {}, outputs), _KERNELS_OF.get(name, 1))
        return result


@contextmanager
def _attention_of_cuda() -> Iterator[None]:
    """Puts CUDA's fused attention in the place of torch's choice, which for meta tensors is the unfused one.

    In the dispatcher, because autograd's engine knows no modes for functions when a layer is recomputed.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _flash_attention, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """With a mask too, which a window in fp32 needs: half of the mask's scores count, as half of the causal ones do."""
    result: Tensor = _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    return result


def _work_of(name: str, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> KernelWork:
    """The work of one operator."""
    if name in _PRODUCTS:
        return _product_of(name, args, outputs[0])
    if name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"):
        q, k = args[1:3] if name.endswith("backward") else args[0:2]
        return _attention_of(name, args, outputs, scores=prod(q.shape[:-1]) * k.shape[2] // 2)
    if name in ("_varlen_attn", "_varlen_attn_backward"):
        return _attention_of(name, args, outputs, scores=_varlen_scores(args))
    written = _written(func, args, kwargs)
    if name in _READS_PART:
        num_bytes = 2 * _bytes_of(outputs) + _bytes_of(_meta_tensors((args[1:], kwargs)))
    elif name == "index_put_":
        num_bytes = 3 * _bytes_of([args[2]]) + _bytes_of(_meta_tensors(args[1]))
    elif name == "embedding_dense_backward":  # each of its kernels has a quarter
        num_bytes = (2 * _bytes_of([args[0]]) + _bytes_of(outputs)) // _KERNELS_OF[name]
    else:
        overwritten = written if name in _OVERWRITES else [kwargs["out"]] if "out" in kwargs else []
        reads = [each for each in _meta_tensors((args, kwargs)) if all(each is not other for other in overwritten)]
        num_bytes = _bytes_of(reads) + _bytes_of(written or outputs)
    return KernelWork(name=name, kind="elementwise", num_bytes=num_bytes)


def _product_of(name: str, args: Any, output: Tensor) -> KernelWork:
    a, b = args[:2] if name in ("mm", "bmm") else args[1:3]
    *batch, m, k = a.shape
    sizes = (m, k, b.shape[-1])
    return KernelWork(
        name=name,
        kind="product",
        num_bytes=_bytes_of([a, b, output]) + (0 if name in ("mm", "bmm") else _bytes_of([args[0]])),
        flops=2 * prod(batch) * prod(sizes),
        narrowest=min(sizes),
        is_aligned=all(_is_aligned(each) for each in (a, b, output)),
        itemsize=a.dtype.itemsize,
    )


def _varlen_scores(args: Any) -> int:
    """Causal scores of sequences that are as long as the longest, within a window of (keys before, 0); -1: any."""
    tokens, heads, _ = args[0].shape
    longest = next(each for each in args if type(each) is int)
    window = min(args[-1][0] + 1 or longest, longest)
    return int(tokens * heads * window * (1 - window / (2 * longest)))


def _attention_of(name: str, args: Any, outputs: list[Tensor], *, scores: int) -> KernelWork:
    """Causal attention; backward repeats the forward's product and has four more."""
    is_backward = name.endswith("backward")
    q = args[1] if is_backward else args[0]
    forward_flops = 4 * q.shape[-1] * scores
    kind: WorkKind = "attention_backward" if is_backward else "attention"
    flops = forward_flops * 5 // 2 if is_backward else forward_flops
    num_bytes = _bytes_of(_meta_tensors(args)) + _bytes_of(outputs)
    return KernelWork(name=name, kind=kind, num_bytes=num_bytes, flops=flops, itemsize=q.dtype.itemsize)


def _is_view(func: Any) -> bool:
    aliases = [each.alias_info for each in func._schema.returns]
    return bool(aliases) and all(each is not None and not each.is_write for each in aliases)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The operands that an operator writes to."""
    names = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    by_name = {each.name: value for each, value in zip(func._schema.arguments, args)} | kwargs
    return _meta_tensors([by_name[name] for name in names if name in by_name])


def _is_aligned(matrix: Tensor) -> bool:
    rows = max(matrix.stride()[-2:]) * matrix.dtype.itemsize
    return rows % _ALIGNMENT == 0 or min(matrix.shape[-2:]) == 1


def _meta_tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_meta]


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors, dimensions that are repeated (stride 0) once."""
    return sum(
        each.dtype.itemsize * prod(size for size, stride in zip(each.shape, each.stride()) if stride or size == 0)
        for each in tensors
    )
