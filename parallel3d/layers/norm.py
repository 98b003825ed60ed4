"""Norms, computed in the policy's `keep_fp32` format; their weights' gradients are partial where tokens are sharded.

RMSNorm (Zhang and Sennrich 2019): y = w * x / sqrt(mean(x^2) + eps).
LayerNorm (Ba et al. 2016): y = w * (x - mean(x)) / sqrt(var(x) + eps) + b.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from parallel3d.layers import apex_norm
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.sharding import ParamSharding


def rms_norm(x: Tensor, weight: Tensor, eps: float, keep_fp32_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """y in x's format, and 1/rms (tokens, 1)."""
    wide = x.to(keep_fp32_dtype)
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(x.dtype), scale


def rms_norm_grads(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dx = scale * (g - n * mean(g * n)) with n = x * scale, g = grad * w; dw = sum over tokens of grad * n."""
    normed = x.to(scale.dtype) * scale
    wide_grad = grad.to(scale.dtype)
    product = wide_grad * normed
    weight_grad = product.sum(0)
    inner = (product @ weight.to(scale.dtype).unsqueeze(1)).div_(-x.shape[-1])
    input_grad = torch.mul(wide_grad, weight, out=product)
    return input_grad.addcmul_(normed, inner).mul_(scale).to(x.dtype), weight_grad


@dataclass(frozen=True)
class _RmsKernels:
    """The two functions above, compiled or not."""

    forward: Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class _RmsNorm(Function):
    """Saves x and 1/rms (tokens, 1); the weight's gradient is added to its main gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: ShardedParameter, eps: float, keep_fp32_dtype: torch.dtype, kernels: _RmsKernels
    ) -> Tensor:
        y, scale = kernels.forward(x, weight.detach(), eps, keep_fp32_dtype)
        ctx.save_for_backward(x, scale)
        ctx.weight, ctx.kernels = weight, kernels
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, scale = ctx.saved_tensors
        input_grad, weight_grad = ctx.kernels.backward(grad, x, scale, ctx.weight.detach())
        ctx.weight.sink.add(weight_grad)
        return input_grad, None, None, None, None


class _LayerNorm(Function):
    """Saves x, mean and 1/std (tokens, 1); gradients of weight and bias are added to their main gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: ShardedParameter, bias: ShardedParameter, eps: float, keep_fp32_dtype: torch.dtype
    ) -> Tensor:
        wide_weight, wide_bias = weight.detach().to(keep_fp32_dtype), bias.detach().to(keep_fp32_dtype)
        y, mean, scale = torch.native_layer_norm(x.to(keep_fp32_dtype), x.shape[-1:], wide_weight, wide_bias, eps)
        ctx.save_for_backward(x, mean, scale)
        ctx.weight, ctx.bias = weight, bias
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, mean, scale = ctx.saved_tensors
        weight, bias = (parameter.detach().to(scale.dtype) for parameter in (ctx.weight, ctx.bias))
        input_grad, weight_grad, bias_grad = torch.ops.aten.native_layer_norm_backward(
            grad.to(scale.dtype), x.to(scale.dtype), x.shape[-1:], mean, scale, weight, bias, [True, True, True]
        )
        ctx.weight.sink.add(weight_grad)
        ctx.bias.sink.add(bias_grad)
        return input_grad.to(x.dtype), None, None, None, None


class RMSNorm(nn.Module):
    """(tokens_local, hidden) -> the same. Every tensor-parallel rank holds the whole weight."""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        *,
        eps: float,
        context: LayerContext,
    ):
        super().__init__()
        self.eps = eps
        self.keep_fp32_dtype = context.policy.keep_fp32_dtype
        self.kernels = _RmsKernels(context.kernel(rms_norm), context.kernel(rms_norm_grads))
        self.backend = context.norm_backend
        sharding = ParamSharding(
            name=name,
            shape=(hidden_size,),
            partial_grad=context.tp.is_token_sharded,
            init_std=None,
            is_norm_or_bias=True,
        )
        self.weight = context.parameter(sharding)

    def forward(self, x: Tensor) -> Tensor:
        if self.backend == "apex":
            return apex_norm.rms_norm(x, self.weight, self.eps)
        return _RmsNorm.apply(x, self.weight, self.eps, self.keep_fp32_dtype, self.kernels)


class LayerNorm(nn.Module):
    """(tokens_local, hidden) -> the same. Every tensor-parallel rank holds all of weight and bias."""

    def __init__(self, name: str, hidden_size: int, *, eps: float, context: LayerContext):
        super().__init__()
        self.eps = eps
        self.keep_fp32_dtype = context.policy.keep_fp32_dtype
        self.backend = context.norm_backend
        weight, bias = (
            ParamSharding(
                name=f"{name}.{part}",
                shape=(hidden_size,),
                partial_grad=context.tp.is_token_sharded,
                init_std=init_std,
                is_norm_or_bias=True,
            )
            for part, init_std in (("weight", None), ("bias", 0.0))
        )
        self.weight, self.bias = context.parameter(weight), context.parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.backend == "apex":
            return apex_norm.layer_norm(x, self.weight, self.bias, self.eps)
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps, self.keep_fp32_dtype)
