"""The table of the operations of layers that are neither products nor attention: each layer takes its own from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn.functional import gelu

from parallel3d.kernels import (
    torch_activations,
    torch_attention,
    torch_cross_entropy,
    torch_dropout,
    torch_embedding,
    torch_norms,
    torch_rotary,
)
from parallel3d.kernels.choice import KernelForm
from parallel3d.kernels.torch_dropout import DropoutMask
from parallel3d.kernels.torch_norms import Normed, NormGrads
from parallel3d.kernels.torch_rotary import HeadLayout
from parallel3d.parallel.group import Group

GeluForm = Literal["none", "tanh"]
"""torch's names: exact, and by a hyperbolic tangent."""


class NormForward(Protocol):
    """Adds delta to x (tokens, hidden) and norms the sum, in `wide_dtype`."""

    def __call__(
        self, x: Tensor, delta: Tensor | None, parameters: tuple[Tensor, ...], eps: float, wide_dtype: torch.dtype
    ) -> Normed: ...


class NormBackward(Protocol):
    """Gradients of the total, to which `residual_grad` is added, and of the parameters."""

    def __call__(
        self,
        grad: Tensor,
        total: Tensor,
        statistics: tuple[Tensor, ...],
        parameters: tuple[Tensor, ...],
        residual_grad: Tensor | None,
    ) -> NormGrads: ...


@dataclass(frozen=True, kw_only=True)
class NormKernels:
    """One kind of norm."""

    forward: NormForward
    backward: NormBackward


@dataclass(frozen=True, kw_only=True)
class Activation:
    """A function of an MLP's intermediate result, in front of the product that follows."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    """(gradient of the result, input, the result if it was kept) -> the gradient of the input, and the result."""
    keeps_result: bool = False
    """Whether the result is kept for the backward pass, because it costs more than memory to compute again."""


IDENTITY = Activation(forward=lambda x: x, backward=lambda grad, x, _kept: (grad, x))


class RotaryForward(Protocol):
    """Splits qkv (batch, seq, q + k + v) into q, k and v by heads and rotates q and k, possibly in place."""

    def __call__(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: HeadLayout, *, may_overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class RotaryKernels:
    """The split of a fused projection, with rotary positions."""

    forward: RotaryForward
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, HeadLayout], Tensor]
    """(dq, dk, dv, cos, sin, heads) -> the gradient of qkv."""


class CrossEntropyFn(Protocol):
    """Token losses of logits over the group's vocabulary. With a `grad_factor` the gradient takes the logits' place."""

    def __call__(
        self, logits: Tensor, local_targets: Tensor, group: Group, grad_factor: float | None, wide_dtype: torch.dtype
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class DropoutKernels:
    """Dropout of (tokens_local, hidden)."""

    forward: Callable[[Tensor, DropoutMask], tuple[Tensor, Tensor]]
    """The result, and a tensor that the backward pass needs."""
    backward: Callable[[Tensor, DropoutMask, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class AttentionKernels:
    """Causal attention over blocks of queries; a group of query heads shares a key-value head's keys and values."""

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    """q (batch, key-value heads, group, seq, size), k and v (batch, key-value heads, seq, size) -> (batch, seq, query
    heads, size), contiguous: the order in which the output projection reads it."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """(gradient of the result, q, k, v) -> the gradients of q, k and v."""


AddRowsFn = Callable[[Tensor, Tensor, Tensor], None]
"""buffer[index[i]] += rows[i] where index[i] is a row of the buffer."""


SumRowsFn = Callable[[Tensor, torch.dtype], Tensor]
"""The sum over the rows of a gradient (tokens, features), for a main gradient of a format: in that one or a wider."""


@dataclass(frozen=True, kw_only=True)
class LayerKernels:
    """One form of every operation."""

    rms_norm: NormKernels
    layer_norm: NormKernels
    rotary: RotaryKernels
    attention: AttentionKernels
    silu_times: Activation
    gelu_times: Activation
    gelu: Mapping[GeluForm, Activation]
    cross_entropy: CrossEntropyFn
    dropout: DropoutKernels
    add_rows: AddRowsFn
    sum_rows: SumRowsFn


def _torch_gelu(form: GeluForm) -> Activation:
    return Activation(
        forward=partial(gelu, approximate=form),
        backward=partial(torch_activations.gelu_grads, approximate=form),
        keeps_result=True,
    )


TORCH_KERNELS = LayerKernels(
    rms_norm=NormKernels(forward=torch_norms.rms_norm, backward=torch_norms.rms_norm_grads),
    layer_norm=NormKernels(forward=torch_norms.layer_norm, backward=torch_norms.layer_norm_grads),
    rotary=RotaryKernels(forward=torch_rotary.split_and_rotate, backward=torch_rotary.packed_grads),
    attention=AttentionKernels(forward=torch_attention.attention, backward=torch_attention.attention_grads),
    silu_times=Activation(forward=torch_activations.silu_times, backward=torch_activations.silu_times_grads),
    gelu_times=Activation(forward=torch_activations.gelu_times, backward=torch_activations.gelu_times_grads),
    gelu={form: _torch_gelu(form) for form in get_args(GeluForm)},
    cross_entropy=torch_cross_entropy.cross_entropy,
    dropout=DropoutKernels(forward=torch_dropout.drop, backward=torch_dropout.drop_grad),
    add_rows=torch_embedding.add_rows,
    sum_rows=lambda grad, dtype: grad.sum(0, dtype=dtype),
)


def layer_kernels(form: KernelForm, *, compiles: bool = False) -> LayerKernels:
    """The table of a form; `compiles`: torch's chains of elementwise operators become one kernel each.

    Triton, and what torch.compile is for, are imported only where they are chosen.
    """
    table: LayerKernels = TORCH_KERNELS
    if form == "triton":
        table = import_module("parallel3d.kernels.triton_layer_kernels").triton_layer_kernels()
    elif form == "c":
        table = import_module("parallel3d.kernels.c_layer_kernels").c_layer_kernels()
    elif compiles:
        table = import_module("parallel3d.kernels.compiled_layer_kernels").compiled_layer_kernels()
    return table
