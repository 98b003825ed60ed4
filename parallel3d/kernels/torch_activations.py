"""The activations of feed-forward blocks as torch operators: the definition.

The backward passes of SwiGLU and GeGLU compute the activation again, for the weight gradient of the product that
follows, so that only its input is kept: for width f and hidden size h that saves f of 8 h + 3 f numbers a token and
layer, and costs SwiGLU one multiplication. GELU's result is kept: on a CPU it is the slowest elementwise operator.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu


def silu_times(gate_up: Tensor) -> Tensor:
    """(tokens, 2 n) = [gate | up] -> silu(gate) * up (tokens, n) (SwiGLU: Shazeer 2020)."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate).mul_(up)


def silu_times_grads(grad: Tensor, gate_up: Tensor, _kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient of [gate | up], and silu(gate) * up again.

    d up = grad * silu(gate); d gate = grad * up * silu'(gate). Both are written into the halves of one buffer, without
    a concatenation.
    """
    gate, up = gate_up.chunk(2, -1)
    result = torch.empty_like(gate_up)
    gate_grad, up_grad = result.chunk(2, -1)
    activated = silu(gate)
    torch.mul(grad, activated, out=up_grad)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
    return result, activated.mul_(up)


def gelu_times(gate_up: Tensor) -> Tensor:
    """(tokens, 2 n) = [gate | up] -> gelu(gate) * up (tokens, n), by a hyperbolic tangent (GeGLU: Shazeer 2020)."""
    gate, up = gate_up.chunk(2, -1)
    return gelu(gate, approximate="tanh").mul_(up)


def gelu_times_grads(grad: Tensor, gate_up: Tensor, _kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient of [gate | up], and gelu(gate) * up again, as `silu_times_grads`."""
    gate, up = gate_up.chunk(2, -1)
    result = torch.empty_like(gate_up)
    gate_grad, up_grad = result.chunk(2, -1)
    activated = gelu(gate, approximate="tanh")
    torch.mul(grad, activated, out=up_grad)
    torch.ops.aten.gelu_backward.grad_input(grad * up, gate, approximate="tanh", grad_input=gate_grad)
    return result, activated.mul_(up)


def gelu_grads(grad: Tensor, x: Tensor, kept: Tensor | None, *, approximate: str) -> tuple[Tensor, Tensor]:
    """The gradient of x, and gelu(x) (Hendrycks and Gimpel 2016)."""
    assert kept is not None
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate), kept
