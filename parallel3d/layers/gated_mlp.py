"""Gated feed-forward blocks (Shazeer 2020: SwiGLU, GeGLU) with gate and up fused into one column-parallel product.

The activation belongs to the product that follows, which keeps [gate | up] alone for the backward pass.
"""

from __future__ import annotations

from torch import Tensor, nn

from parallel3d.kernels.layer_kernels import Activation
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.sharding import FusedBlock


class GatedMlp(nn.Module):
    """(tokens_local, hidden) -> (tokens_local, hidden); `activation` makes one tensor of [gate | up]."""

    def __init__(
        self,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        init_std: float,
        output_init_std: float,
        activation: Activation,
        context: LayerContext,
    ):
        super().__init__()
        fused_blocks = (FusedBlock(name="gate", size=intermediate_size), FusedBlock(name="up", size=intermediate_size))
        self.gate_up = ColumnParallelLinear(
            f"{name}.gate_up", hidden_size, fused_blocks, init_std=init_std, context=context
        )
        self.down = RowParallelLinear(
            f"{name}.down",
            intermediate_size,
            hidden_size,
            init_std=output_init_std,
            activation=activation,
            context=context,
        )

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        return self.down(self.gate_up(x, micro_batch), micro_batch)
