"""GPT-2's feed-forward block: down(gelu(up(x))), with biases (Hendrycks and Gimpel 2016; Radford et al. 2019).

"gelu_new" is x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), "gelu" the exact x Phi(x).
"""

from __future__ import annotations

from torch import Tensor, nn

from parallel3d.kernels.layer_kernels import GeluForm
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.sharding import FusedBlock

APPROXIMATION: dict[str, GeluForm] = {"gelu_new": "tanh", "gelu": "none"}
"""torch's name for each activation function."""


class GeluMlp(nn.Module):
    """(tokens_local, hidden) -> (tokens_local, hidden)."""

    def __init__(
        self,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        activation_function: str,
        init_std: float,
        output_init_std: float,
        context: LayerContext,
    ):
        super().__init__()
        fused_blocks = (FusedBlock(name="up", size=intermediate_size),)
        self.up = ColumnParallelLinear(
            f"{name}.up", hidden_size, fused_blocks, init_std=init_std, bias=True, context=context
        )
        self.down = RowParallelLinear(
            f"{name}.down",
            intermediate_size,
            hidden_size,
            init_std=output_init_std,
            bias=True,
            activation=context.kernels.gelu[APPROXIMATION[activation_function]],
            context=context,
        )

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        return self.down(self.up(x, micro_batch), micro_batch)
