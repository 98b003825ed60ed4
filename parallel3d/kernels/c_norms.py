"""RMSNorm and LayerNorm by loops in C: one pass over memory each way (`torch_norms.py` defines it)."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.kernels import torch_norms
from parallel3d.kernels.c_loops import fits_c_loops, is_narrow, run_layer_loop
from parallel3d.kernels.torch_norms import Normed, NormGrads

_BLOCK_ROWS = 32
"""Rows whose share of the weight's gradient is added up in order; BLOCK_ROWS of layer_loops.c."""


def rms_norm(
    x: Tensor, delta: Tensor | None, parameters: tuple[Tensor, ...], eps: float, wide_dtype: torch.dtype
) -> Normed:
    """Statistics: 1 / sqrt(mean(t^2) + eps)."""
    if not fits_c_loops(x, wide_dtype):
        return torch_norms.rms_norm(x, delta, parameters, eps, wide_dtype)
    x, delta = x.contiguous(), None if delta is None else delta.contiguous()
    rows, width = x.shape
    total, y = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    scale, weight = x.new_empty((rows, 1), dtype=wide_dtype), parameters[0].to(wide_dtype)
    run_layer_loop("rms_norm", x, delta, weight, total, y, scale, rows, width, eps, is_narrow(x))
    return Normed(total, y, (scale,))


def rms_norm_grads(
    grad: Tensor,
    total: Tensor,
    statistics: tuple[Tensor, ...],
    parameters: tuple[Tensor, ...],
    residual_grad: Tensor | None,
) -> NormGrads:
    """As `torch_norms.rms_norm_grads`, rounded once; the weight's gradient is summed by blocks of rows."""
    (scale,), (weight,) = statistics, parameters
    if not fits_c_loops(total, scale.dtype):
        return torch_norms.rms_norm_grads(grad, total, statistics, parameters, residual_grad)
    grad, weight = grad.contiguous(), weight.to(scale.dtype)
    residual_grad = None if residual_grad is None else residual_grad.contiguous()
    rows, width = total.shape
    num_blocks = -(-rows // _BLOCK_ROWS)
    total_grad, partial = torch.empty_like(total), scale.new_zeros((max(1, num_blocks), width))
    places = (total_grad, partial, rows, width, is_narrow(total))
    run_layer_loop("rms_norm_grads", grad, total, residual_grad, weight, scale, *places)
    run_layer_loop("add_blocks", partial, num_blocks, width)
    return NormGrads(total_grad, (partial[0],))


def layer_norm(
    x: Tensor, delta: Tensor | None, parameters: tuple[Tensor, ...], eps: float, wide_dtype: torch.dtype
) -> Normed:
    """Statistics: mean(t) and 1 / sqrt(var(t) + eps)."""
    if not fits_c_loops(x, wide_dtype):
        return torch_norms.layer_norm(x, delta, parameters, eps, wide_dtype)
    x, delta = x.contiguous(), None if delta is None else delta.contiguous()
    rows, width = x.shape
    total, y = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    mean, scale = (x.new_empty((rows, 1), dtype=wide_dtype) for _ in range(2))
    weight, bias = (parameter.to(wide_dtype) for parameter in parameters)
    run_layer_loop("layer_norm", x, delta, weight, bias, total, y, mean, scale, rows, width, eps, is_narrow(x))
    return Normed(total, y, (mean, scale))


def layer_norm_grads(
    grad: Tensor,
    total: Tensor,
    statistics: tuple[Tensor, ...],
    parameters: tuple[Tensor, ...],
    residual_grad: Tensor | None,
) -> NormGrads:
    """As `torch_norms.layer_norm_grads`, rounded once; the parameters' gradients are summed by blocks of rows."""
    mean, scale = statistics
    if not fits_c_loops(total, scale.dtype):
        return torch_norms.layer_norm_grads(grad, total, statistics, parameters, residual_grad)
    grad, weight = grad.contiguous(), parameters[0].to(scale.dtype)
    residual_grad = None if residual_grad is None else residual_grad.contiguous()
    rows, width = total.shape
    num_blocks = -(-rows // _BLOCK_ROWS)
    total_grad, partial = torch.empty_like(total), scale.new_zeros((max(1, num_blocks), 2, width))
    places = (total_grad, partial, rows, width, is_narrow(total))
    run_layer_loop("layer_norm_grads", grad, total, residual_grad, weight, mean, scale, *places)
    run_layer_loop("add_blocks", partial, num_blocks, 2 * width)
    return NormGrads(total_grad, (partial[0, 0], partial[0, 1]))
