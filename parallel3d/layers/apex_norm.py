"""Norms by NVIDIA apex's fused kernels (FusedRMSNorm, FusedLayerNorm). Never run on apex itself.

apex computes in fp32 for any format of the activations, and returns the weight's gradient in the weight's format: one
more rounding than in `norm.py` before it is added to the main gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from parallel3d.backends import find_symbol
from parallel3d.layers.parameter import ShardedParameter

MODULE = "apex.normalization.fused_layer_norm"
SYMBOL = (MODULE, "fused_rms_norm_affine")


class _MainGrad(Function):
    """The identity; the gradient is added to the parameter's main gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: ShardedParameter) -> Tensor:
        ctx.parameter = parameter
        return parameter.detach().view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        ctx.parameter.sink.add(grad)


def rms_norm(x: Tensor, weight: ShardedParameter, eps: float) -> Tensor:
    """(tokens, hidden) -> the same."""
    return _call("fused_rms_norm_affine", x, _MainGrad.apply(weight), weight.shape, eps)


def layer_norm(x: Tensor, weight: ShardedParameter, bias: ShardedParameter, eps: float) -> Tensor:
    """(tokens, hidden) -> the same."""
    return _call("fused_layer_norm_affine", x, _MainGrad.apply(weight), _MainGrad.apply(bias), weight.shape, eps)


def _call(name: str, *arguments: Any) -> Tensor:
    function = find_symbol(MODULE, name)
    assert function is not None, "chosen without apex"
    return function(*arguments)
