"""Matrix products on the fastest kernel that torch ships for the format and the device.

On CPUs torch sends fp32 products to MKL, which on AMD's processors runs its AVX2 kernels: half the machine. oneDNN,
which torch uses for bf16, generates AVX-512 code on both vendors' (docs/experiments.md has the figures). Its only entry
for plain fp32 tensors is the operator of fused linear layers, which accepts transposed views. On CPUs without fp16
instructions torch's product of fp16 tensors takes 30 to 90 times as long as that of fp32 ones, whose result differs by
one rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL = 1 << 18  # multiplications; below, the operator's overhead (about 10 us) shows


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (m, k) @ b (k, n), each possibly a transposed view; no autograd."""
    if a.dtype is torch.float16 and a.device.type == "cpu":
        return matmul(a.float(), b.float()).to(a.dtype)
    if _fits_onednn(a, b):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return a @ b


def add_matmul(total: Tensor, a: Tensor, b: Tensor, *, wide: bool = False) -> None:
    """total += a @ b, in total's format; the product is first rounded to the factors' format, unless `wide`.

    oneDNN copies a transposed first factor; where it makes this copy smaller, the transposed product is computed.
    """
    if wide:
        a, b = a.to(total.dtype), b.to(total.dtype)
    if _fits_onednn(a, b) and a.shape[0] > b.shape[1]:
        total.t().add_(matmul(b.t(), a.t()))
    elif _fits_onednn(a, b) or total.dtype != a.dtype:
        total += matmul(a, b)
    else:
        torch.addmm(total, a, b, out=total)


def _fits_onednn(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype is torch.float32
        and a.device.type == "cpu"
        and a.shape[0] * a.shape[1] * b.shape[1] >= _SMALL
        and torch.backends.mkldnn.is_available()
    )
