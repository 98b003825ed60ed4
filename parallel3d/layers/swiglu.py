"""The SwiGLU feed-forward block (Shazeer 2020) with gate and up fused into one column-parallel product.

The activation's backward writes both gradients into the two halves of one buffer, without a concatenation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import silu

from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.sharding import FusedBlock


class _SiluTimes(Function):
    """(tokens, 2 n) = [gate | up] -> silu(gate) * up (tokens, n)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """d up = grad * silu(gate); d gate = grad * up * silu'(gate)."""
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        result = torch.empty_like(gate_up)
        gate_grad, up_grad = result.chunk(2, -1)
        torch.mul(grad, silu(gate), out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        return result


def silu_times(gate_up: Tensor) -> Tensor:
    """[gate | up] -> silu(gate) * up as a formula for a compiler, which differentiates it and makes it one kernel."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


class SwiGLU(nn.Module):
    """(tokens_local, hidden) -> (tokens_local, hidden)."""

    def __init__(
        self,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        init_std: float,
        output_init_std: float,
        context: LayerContext,
    ):
        super().__init__()
        self.activation = context.kernel(silu_times) if context.compiles else _SiluTimes.apply
        fused_blocks = (FusedBlock(name="gate", size=intermediate_size), FusedBlock(name="up", size=intermediate_size))
        self.gate_up = ColumnParallelLinear(
            f"{name}.gate_up", hidden_size, fused_blocks, init_std=init_std, context=context
        )
        self.down = RowParallelLinear(
            f"{name}.down",
            intermediate_size,
            hidden_size,
            init_std=output_init_std,
            context=context,
        )

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        return self.down(self.activation(self.gate_up(x, micro_batch)), micro_batch)
