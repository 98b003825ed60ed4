"""RMSNorm (Zhang and Sennrich 2019): y = w * x / sqrt(mean(x^2) + eps), computed in the policy's sensitive format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import Placement
from parallel3d.sharding import ParamSharding


class _RmsNorm(Function):
    """Saves x and 1/rms (tokens, 1); the weight's gradient is added to its main gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ShardedParameter, eps: float, sensitive: torch.dtype) -> Tensor:
        wide = x.to(sensitive)
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        """dx = scale * (g - n * mean(g * n)) with n = x * scale, g = grad * w; dw = sum over tokens of grad * n."""
        x, scale = ctx.saved_tensors
        weight = ctx.weight.detach()
        normed = x.to(scale.dtype) * scale
        wide_grad = grad.to(scale.dtype)
        product = wide_grad * normed
        ctx.weight.grad_buffer().add_(product.sum(0))
        ctx.weight.grad_added()
        inner = (product @ weight.to(scale.dtype).unsqueeze(1)).div_(-x.shape[-1])
        input_grad = torch.mul(wide_grad, weight, out=product)
        input_grad = input_grad.addcmul_(normed, inner).mul_(scale)
        return input_grad.to(x.dtype), None, None, None


class RMSNorm(nn.Module):
    """(tokens_local, hidden) -> the same. Every tensor-parallel rank holds the whole weight."""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        *,
        eps: float,
        on: Placement,
    ):
        super().__init__()
        self.eps = eps
        self.sensitive = on.policy.sensitive
        sharding = ParamSharding(
            name=name, shape=(hidden_size,), partial_grad=on.tp.cuts_tokens, init_std=None, is_norm_or_bias=True
        )
        self.weight = on.parameter(sharding)

    def forward(self, x: Tensor) -> Tensor:
        return _RmsNorm.apply(x, self.weight, self.eps, self.sensitive)
