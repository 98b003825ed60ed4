"""The torch forms of `layer_kernels.py`, each made one kernel by torch.compile where they are chains of elementwise
operators (`run.compile`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from parallel3d.kernels import torch_activations, torch_norms
from parallel3d.kernels.layer_kernels import TORCH_KERNELS, Activation, LayerKernels, NormKernels, RotaryKernels
from parallel3d.kernels.torch_norms import NormGrads
from parallel3d.kernels.torch_rotary import HeadLayout, split_heads

P = ParamSpec("P")
R = TypeVar("R")


def compiled_layer_kernels() -> LayerKernels:
    """The table; nothing is compiled before the first call."""
    return replace(
        TORCH_KERNELS,
        rms_norm=NormKernels(
            forward=_compiled(torch_norms.rms_norm),
            backward=_compiled(rms_norm_grads_formula),
        ),
        rotary=RotaryKernels(forward=_compiled(split_and_rotate_formula), backward=_compiled(packed_grads_formula)),
        silu_times=Activation(
            forward=_compiled(torch_activations.silu_times), backward=_compiled(silu_times_grads_formula)
        ),
    )


def rms_norm_grads_formula(
    grad: Tensor,
    total: Tensor,
    statistics: tuple[Tensor, ...],
    parameters: tuple[Tensor, ...],
    residual_grad: Tensor | None,
) -> NormGrads:
    """`rms_norm_grads` without a product with the weight, for which a compiler would write a matrix to memory and read
    it again."""
    (scale,), (weight,) = statistics, parameters
    normed = total.to(scale.dtype) * scale
    weight_grad = (grad.to(scale.dtype) * normed).sum(0)
    wide_grad = grad.to(scale.dtype) * weight
    inner = (wide_grad * normed).sum(-1, keepdim=True) / total.shape[-1]
    input_grad = ((wide_grad - normed * inner) * scale).to(total.dtype)
    return NormGrads(input_grad if residual_grad is None else input_grad + residual_grad, (weight_grad,))


def silu_times_grads_formula(grad: Tensor, gate_up: Tensor, _kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """`silu_times_grads` without views that are written to, which a compiler refuses."""
    gate, up = gate_up.chunk(2, -1)
    sigmoid = gate.sigmoid()
    activated = gate * sigmoid
    gate_grad = grad * up * (sigmoid + activated * (1 - sigmoid))
    return torch.cat((gate_grad, grad * activated), -1), activated * up


def split_and_rotate_formula(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: HeadLayout, *, may_overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`split_and_rotate` without views that are written to."""
    q, k, v = split_heads(qkv, heads)
    return _rotated(q, cos, sin), _rotated(k, cos, sin), v.clone()


def packed_grads_formula(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, heads: HeadLayout) -> Tensor:
    """`packed_grads` without views that are written to."""
    parts = (_rotated(dq, cos, -sin), _rotated(dk, cos, -sin), dv)
    return torch.cat([part.flatten(2) for part in parts], -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


@cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    """One compiled function for all layers, made at the first call; a second length makes one for all lengths."""
    return torch.compile(function, fullgraph=True)
