"""RMSNorm and LayerNorm as torch operators, fused with the residual connection in front of them: the definition.

RMSNorm (Zhang and Sennrich 2019): y = w * t / sqrt(mean(t^2) + eps), t = x + delta.
LayerNorm (Ba et al. 2016): y = w * (t - mean(t)) / sqrt(var(t) + eps) + b.

They are computed in `wide`, the policy's `keep_fp32` format.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Normed(NamedTuple):
    """Results of a norm's forward pass."""

    total: Tensor
    """(tokens, hidden): x + delta, or x itself without a delta."""
    y: Tensor
    """(tokens, hidden) in x's format: the norm of the total."""
    statistics: tuple[Tensor, ...]
    """(tokens, 1) each, for the backward pass."""


class NormGrads(NamedTuple):
    """Results of a norm's backward pass."""

    total: Tensor
    """(tokens, hidden) in x's format: of x, and of delta."""
    parameters: tuple[Tensor, ...]
    """(hidden,) each, in the wide format: of the weight, and of the bias if there is one."""


def rms_norm(
    x: Tensor, delta: Tensor | None, parameters: tuple[Tensor, ...], eps: float, wide_dtype: torch.dtype
) -> Normed:
    """Statistics: 1 / sqrt(mean(t^2) + eps)."""
    (weight,) = parameters
    total = x if delta is None else x + delta
    wide = total.to(wide_dtype)
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return Normed(total, (wide * scale).mul_(weight).to(x.dtype), (scale,))


def rms_norm_grads(
    grad: Tensor,
    total: Tensor,
    statistics: tuple[Tensor, ...],
    parameters: tuple[Tensor, ...],
    residual_grad: Tensor | None,
) -> NormGrads:
    """dt = scale * (g - n * mean(g * n)) + residual_grad with n = t * scale, g = grad * w; dw = sum over tokens of
    grad * n. `residual_grad` is the total's gradient but for the norm's part."""
    (scale,), (weight,) = statistics, parameters
    normed = total.to(scale.dtype) * scale
    wide_grad = grad.to(scale.dtype)
    product = wide_grad * normed
    weight_grad = product.sum(0)
    inner = (product @ weight.to(scale.dtype).unsqueeze(1)).div_(-total.shape[-1])
    input_grad = torch.mul(wide_grad, weight, out=product)
    input_grad = input_grad.addcmul_(normed, inner).mul_(scale).to(total.dtype)
    return NormGrads(_plus(input_grad, residual_grad), (weight_grad,))


def layer_norm(
    x: Tensor, delta: Tensor | None, parameters: tuple[Tensor, ...], eps: float, wide_dtype: torch.dtype
) -> Normed:
    """Statistics: mean(t) and 1 / sqrt(var(t) + eps)."""
    total = x if delta is None else x + delta
    weight, bias = (parameter.to(wide_dtype) for parameter in parameters)
    y, mean, scale = torch.native_layer_norm(total.to(wide_dtype), x.shape[-1:], weight, bias, eps)
    return Normed(total, y.to(x.dtype), (mean, scale))


def layer_norm_grads(
    grad: Tensor,
    total: Tensor,
    statistics: tuple[Tensor, ...],
    parameters: tuple[Tensor, ...],
    residual_grad: Tensor | None,
) -> NormGrads:
    """dt = scale * (g - mean(g) - n * mean(g * n)) + residual_grad with n = (t - mean) * scale, g = grad * w; dw and db
    are the sums over tokens of grad * n and of grad."""
    mean, scale = statistics
    wide_dtype = scale.dtype
    weight, bias = (parameter.to(wide_dtype) for parameter in parameters)
    input_grad, *parameter_grads = torch.ops.aten.native_layer_norm_backward(
        grad.to(wide_dtype), total.to(wide_dtype), total.shape[-1:], mean, scale, weight, bias, [True, True, True]
    )
    return NormGrads(_plus(input_grad.to(total.dtype), residual_grad), tuple(parameter_grads))


def _plus(input_grad: Tensor, residual_grad: Tensor | None) -> Tensor:
    return input_grad if residual_grad is None else input_grad.add_(residual_grad)
