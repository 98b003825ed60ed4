"""SwiGLU's activation, and GELU by a hyperbolic tangent, in C (`torch_activations.py` and torch define them).

Torch's GELU costs a pass that is worth keeping its result; this one costs less than reading it, and computes it again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu

from parallel3d.kernels import torch_activations
from parallel3d.kernels.c_loops import fits_c_loops, is_narrow, run_layer_loop


def silu_times(gate_up: Tensor) -> Tensor:
    """(tokens, 2 n) = [gate | up] -> silu(gate) * up (tokens, n)."""
    if not fits_c_loops(gate_up, torch.float32):
        return torch_activations.silu_times(gate_up)
    gate_up, (rows, both) = gate_up.contiguous(), gate_up.shape
    result = gate_up.new_empty((rows, both // 2))
    run_layer_loop("silu_times", gate_up, result, rows, both // 2, is_narrow(gate_up))
    return result


def silu_times_grads(grad: Tensor, gate_up: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient of [gate | up], and silu(gate) * up again."""
    if not fits_c_loops(gate_up, torch.float32):
        return torch_activations.silu_times_grads(grad, gate_up, kept)
    grad, gate_up, (rows, both) = grad.contiguous(), gate_up.contiguous(), gate_up.shape
    gate_up_grad, result = torch.empty_like(gate_up), torch.empty_like(grad)
    places = (gate_up_grad, result, rows, both // 2, is_narrow(gate_up))
    run_layer_loop("silu_times_grads", grad, gate_up, *places)
    return gate_up_grad, result


def gelu_tanh(x: Tensor) -> Tensor:
    """(tokens, n) -> (tokens, n)."""
    if not fits_c_loops(x, torch.float32):
        return gelu(x, approximate="tanh")
    x = x.contiguous()
    result = torch.empty_like(x)
    run_layer_loop("gelu_tanh", x, result, *x.shape, is_narrow(x))
    return result


def gelu_tanh_grads(grad: Tensor, x: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient of x, and gelu(x) again."""
    if not fits_c_loops(x, torch.float32):
        return torch_activations.gelu_grads(grad, x, gelu_tanh(x), approximate="tanh")
    grad, x = grad.contiguous(), x.contiguous()
    x_grad, result = torch.empty_like(x), torch.empty_like(x)
    run_layer_loop("gelu_tanh_grads", grad, x, x_grad, result, *x.shape, is_narrow(x))
    return x_grad, result
