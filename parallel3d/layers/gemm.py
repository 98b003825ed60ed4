"""The products of linear layers, each on the library that is fastest for its role on this machine, and the choices of
attention's form and of all other kernels'.

On CPUs torch sends fp32 products to MKL. On AMD's processors MKL runs its AVX2 kernels, half of what the machine can
do; oneDNN, which torch uses for bf16, generates AVX-512 code on both vendors'. On Intel's it is the slower one, most of
all for weight gradients (docs/experiments.md has the figures). Its only door for plain fp32 tensors is the operator
behind fused linear layers; it takes transposed views as they are. So a run times both (`worker/gemm_timing.py`) and
gives its layers a `Gemm` with the choices: the same on every rank, or the layout would decide last bits.

Without instructions for fp16 torch's product of such tensors takes 30 to 90 times as long as that of fp32 ones, which
gives the same but for one rounding. So it is with bf16 on processors without AVX512 BF16 and AMX: about three times,
and 3 to 45 times without AVX-512.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from parallel3d.accelerator import is_accelerator
from parallel3d.kernels import c_weight_grad
from parallel3d.kernels.c_sums import add_product
from parallel3d.kernels.choice import KernelForm

_SMALL = 1 << 18  # multiplications under which the operator's own overhead (some 10 us) shows

_WIDENING = {(torch.float32, torch.bfloat16), (torch.float32, torch.float16)}
"""Formats (total, factors) that a GPU's products add up without rounding in between."""

Role = Literal["forward", "input_grad", "weight_grad"]
Library = Literal["mkl", "onednn", "tiles", "widened"]
"""mkl: what torch's own product uses, which is MKL on x86. tiles: AMX in a loop of our own, for weight
gradients in bf16, which adds up in fp32 (kernels/c_weight_grad.py). widened: torch's product of bf16 factors that were
widened to fp32, rounded once; one that is added to a total in fp32 is not rounded at all."""
AttentionForm = Literal["sdpa", "blocks"]
"""Attention on CPUs. sdpa: torch's own; blocks: products over blocks of queries (layers/block_attention.py)."""


class ProductKey(NamedTuple):
    """One of the three products with a weight (out, in)."""

    role: Role
    out_features: int
    in_features: int


@dataclass(frozen=True)
class Gemm:
    """The three products of a linear layer y = x W^T, on plain tensors, without autograd; and the other choices of a
    run on CPUs, which are the same on every rank."""

    default: Library = "onednn"
    choices: Mapping[ProductKey, Library] = field(default_factory=dict)
    """Measured ones, where they differ from the default."""
    attention: AttentionForm = "sdpa"
    kernels: KernelForm = "torch"
    """What `run.kernels` auto means on CPUs."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """x (tokens, in), weight (out, in), bias (out,) -> (tokens, out), in `out` if it is given.

        An accelerator adds the bias within the product.
        """
        if bias is not None and is_accelerator(x.device):
            return torch.addmm(bias, x, weight.t(), out=out)
        product = matmul(x, weight.t(), self._library("forward", weight), out=out)
        return product if bias is None else product.add_(bias)

    def input_grad(self, grad: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        """grad (tokens, out), weight (out, in) -> (tokens, in), in `out` if it is given."""
        return matmul(grad, weight, self._library("input_grad", weight), out=out)

    def add_weight_grad(
        self, total: Tensor, grad: Tensor, x: Tensor, *, wide: bool = False, overwrite: bool = False
    ) -> None:
        """total (out, in) += grad^T x for grad (tokens, out), x (tokens, in); see `add_matmul`."""
        library = self._library("weight_grad", total)
        if library == "tiles" and c_weight_grad.add_weight_grad(total, grad, x, overwrite=overwrite):
            return  # as `wide` as it gets
        add_matmul(total, grad.t(), x, library, wide=wide, overwrite=overwrite)

    def to_json(self) -> dict[str, str]:
        """The choices, by "role OUTxIN", "attention" and "kernels"; what is not the default."""
        found: dict[str, str] = {
            f"{key.role} {key.out_features}x{key.in_features}": library for key, library in self.choices.items()
        }
        others = {"attention": (self.attention, Gemm.attention), "kernels": (self.kernels, Gemm.kernels)}
        return found | {name: value for name, (value, default) in others.items() if value != default}

    @staticmethod
    def from_json(choices: Mapping[str, str]) -> Gemm:
        """The inverse of `to_json`; raises ValueError for anything else."""
        products = dict(choices)
        attention, kernels = products.pop("attention", Gemm.attention), products.pop("kernels", Gemm.kernels)
        if attention not in get_args(AttentionForm) or kernels not in get_args(KernelForm):
            raise ValueError(f"unknown form of attention or kernels: {attention}, {kernels}")
        found: dict[ProductKey, Library] = {}
        for text, library in products.items():
            role, _, size = text.partition(" ")
            if role not in get_args(Role) or library not in get_args(Library):
                raise ValueError(f"unknown product {text}: {library}")
            out_features, in_features = map(int, size.split("x"))
            found[ProductKey(cast(Role, role), out_features, in_features)] = cast(Library, library)
        return Gemm(choices=found, attention=cast(AttentionForm, attention), kernels=cast(KernelForm, kernels))

    def _library(self, role: Role, weight: Tensor) -> Library:
        return self.choices.get(ProductKey(role, weight.shape[0], weight.shape[1]), self.default)


def matmul(a: Tensor, b: Tensor, library: Library = "onednn", *, out: Tensor | None = None) -> Tensor:
    """a (m, k) @ b (k, n), each possibly a transposed view, in `out` if it is given; no autograd."""
    if a.device.type == "cpu" and (a.dtype is torch.float16 or _is_widened(a, library)):
        result = matmul(a.float(), b.float(), library)
        return result.to(a.dtype) if out is None else out.copy_(result)
    if _fits_onednn(a, b, library):
        result = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
        return result if out is None else out.copy_(result)
    return torch.mm(a, b, out=out)


def add_matmul(
    total: Tensor, a: Tensor, b: Tensor, library: Library = "onednn", *, wide: bool = False, overwrite: bool = False
) -> None:
    """total += a @ b, in total's format, or with `overwrite` total = a @ b whatever was there. On CPUs the product is
    rounded to the factors' format before, unless it is `wide` or of widened factors; a GPU adds it in fp32 without a
    temporary.

    oneDNN copies a transposed first factor; the product is turned round where that makes the copy the smaller one.
    """
    if wide or total.dtype is torch.float32 and _is_widened(a, library):
        a, b = a.to(total.dtype), b.to(total.dtype)
    elif _is_widened(a, library):  # torch's own product into a bf16 total is not
        product = torch.mm(a.float(), b.float())
        total.copy_(product if overwrite else product.add_(total))
        return
    is_onednn, formats = _fits_onednn(a, b, library), (total.dtype, a.dtype)
    if not is_onednn and formats[0] == formats[1]:
        if overwrite:
            torch.mm(a, b, out=total)
        else:
            torch.addmm(total, a, b, out=total)
        return
    if a.device.type != "cpu" and formats in _WIDENING:
        if overwrite:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        return
    if is_onednn and a.shape[0] > b.shape[1]:
        total, product = total.t(), matmul(b.t(), a.t(), library)
    else:
        product = matmul(a, b, library)
    if overwrite:
        total.copy_(product)
    else:
        add_product(total, product)


def _is_widened(a: Tensor, library: Library) -> bool:
    return library == "widened" and a.dtype is torch.bfloat16 and a.device.type == "cpu"


def _fits_onednn(a: Tensor, b: Tensor, library: Library) -> bool:
    return (
        library == "onednn"
        and a.dtype is torch.float32
        and a.device.type == "cpu"
        and a.shape[0] * a.shape[1] * b.shape[1] >= _SMALL
        and torch.backends.mkldnn.is_available()
    )
