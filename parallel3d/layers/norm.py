"""RMSNorm and LayerNorm with the residual connection in front of them (`kernels/torch_norms.py` defines them).

A layer's residual stream x goes through its norms: each adds what the block before it computed, and hands on the sum
beside its norm. So the sum and the norm are one pass over memory, and so are, backward, the gradients of both. The
parameters' gradients are partial where tokens are sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from parallel3d.kernels.layer_kernels import NormKernels
from parallel3d.layers import apex_norm
from parallel3d.layers.apply_function import apply_function
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.sharding import ParamSharding


class _Norm(Function):
    """Saves the sum and the norm's statistics, (tokens, 1) each; the parameters' gradients are added to their main
    gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        weight: ShardedParameter,
        bias: ShardedParameter | None,
        eps: float,
        offset: float,
        keep_fp32_dtype: torch.dtype,
        kernels: NormKernels,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # a sum that is not used has no gradient
        ctx.parameters = (weight,) if bias is None else (weight, bias)
        ctx.has_delta, ctx.kernels, ctx.offset = delta is not None, kernels, offset
        total, y, statistics = kernels.forward(x, delta, _values(ctx.parameters, offset), eps, keep_fp32_dtype)
        ctx.save_for_backward(total, *statistics)
        return total, y

    @staticmethod
    def backward(ctx: Any, total_grad: Tensor | None, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, *statistics = ctx.saved_tensors
        found = ctx.kernels.backward(grad, total, tuple(statistics), _values(ctx.parameters, ctx.offset), total_grad)
        for parameter, parameter_grad in zip(ctx.parameters, found.parameters):
            parameter.sink.add(parameter_grad)
        return found.total, found.total if ctx.has_delta else None, None, None, None, None, None, None


def _values(parameters: tuple[ShardedParameter, ...], offset: float) -> tuple[Tensor, ...]:
    return tuple(norm_weight(parameter, offset) for parameter in parameters)


def norm_weight(weight: ShardedParameter, offset: float) -> Tensor:
    """The factor of a norm: its parameter, or with an offset their sum, at least in fp32."""
    value = weight.detach()
    return value.to(torch.promote_types(value.dtype, torch.float32)) + offset if offset else value


class RMSNorm(nn.Module):
    """x and delta (tokens_local, hidden) -> x + delta and its norm; without delta x and its norm.

    Every tensor-parallel rank holds the whole weight. The norm is multiplied with `offset` plus the weight, which
    begins at zero if there is an offset, else at one.
    """

    def __init__(self, name: str, hidden_size: int, *, eps: float, offset: float = 0.0, context: LayerContext):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.keep_fp32_dtype = context.policy.keep_fp32_dtype
        self.kernels = context.kernels.rms_norm
        self.backend = "torch" if offset else context.norm_backend  # apex knows no offset
        self.weight = context.parameter(_sharding(name, hidden_size, 0.0 if offset else None, context))

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.backend == "apex":
            total = x if delta is None else x + delta
            return total, apex_norm.rms_norm(total, self.weight, self.eps)
        return apply_function(
            _Norm, x, delta, self.weight, None, self.eps, self.offset, self.keep_fp32_dtype, self.kernels
        )


class LayerNorm(nn.Module):
    """x and delta (tokens_local, hidden) -> x + delta and its norm; without delta x and its norm.

    Every tensor-parallel rank holds all of weight and bias.
    """

    def __init__(self, name: str, hidden_size: int, *, eps: float, context: LayerContext):
        super().__init__()
        self.eps = eps
        self.keep_fp32_dtype = context.policy.keep_fp32_dtype
        self.kernels = context.kernels.layer_norm
        self.backend = context.norm_backend
        self.weight = context.parameter(_sharding(f"{name}.weight", hidden_size, None, context))
        self.bias = context.parameter(_sharding(f"{name}.bias", hidden_size, 0.0, context))

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.backend == "apex":
            total = x if delta is None else x + delta
            return total, apex_norm.layer_norm(total, self.weight, self.bias, self.eps)
        return apply_function(
            _Norm, x, delta, self.weight, self.bias, self.eps, 0.0, self.keep_fp32_dtype, self.kernels
        )


def _sharding(name: str, hidden_size: int, init_std: float | None, context: LayerContext) -> ParamSharding:
    return ParamSharding(
        name=name,
        shape=(hidden_size,),
        partial_grad=context.tp.is_token_sharded,
        init_std=init_std,
        is_norm_or_bias=True,
    )
