"""Column- and row-parallel matrix products (Megatron-LM: Shoeybi et al., section 3), without biases.

A column-parallel weight is cut along its output, a row-parallel one along its input, so that a pair of them needs one
sum forward and one backward. The gradient of the weight goes straight into its main gradient; while it is computed the
sum of the input's gradient travels. When a split backward puts it off, the whole input is kept for it: under sequence
parallelism the gathered one, so that the later half needs nobody.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from parallel3d.comm.tensor_parallel import TensorParallel, leave_region
from parallel3d.layers.gemm import matmul
from parallel3d.layers.parameter import ShardedParameter, add_matrix_grad
from parallel3d.layers.placement import Placement
from parallel3d.sharding import Chunk, ParamSharding


class _ColumnParallel(Function):
    """All-gather (or nothing), GEMM forward; GEMM, reduce-scatter (or all-reduce) beside the weight's GEMM backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ShardedParameter, tp: TensorParallel) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.tp = weight, tp
        return matmul(tp.gather(x), weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        whole, gathering = ctx.tp.gather_async(x)
        input_grad, summing = ctx.tp.sum_async(matmul(grad, ctx.weight))
        gathering.wait()
        add_matrix_grad(ctx.weight, grad, whole)
        summing.wait()
        return input_grad, None, None


class _Linear(Function):
    """y = x W^T whose weight gradient is added to the main gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ShardedParameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        input_grad = matmul(grad, ctx.weight)
        add_matrix_grad(ctx.weight, grad, x)
        return input_grad, None


class ColumnParallelLinear(nn.Module):
    """(tokens, in) -> (tokens, out_local). The weight (out_local, in) is cut inside each of its chunks."""

    def __init__(
        self,
        name: str,
        in_features: int,
        chunks: tuple[Chunk, ...],
        *,
        init_std: float,
        on: Placement,
    ):
        super().__init__()
        self.tp = on.tp
        shape = (sum(chunk.size for chunk in chunks), in_features)
        sharding = ParamSharding(name=name, shape=shape, dim=0, chunks=chunks, init_std=init_std)
        self.weight = on.parameter(sharding)

    def forward(self, x: Tensor) -> Tensor:
        return _ColumnParallel.apply(x, self.weight, self.tp)


class RowParallelLinear(nn.Module):
    """(tokens, in_local) -> (tokens, out), summed over the group; with cut tokens each rank keeps its own."""

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        init_std: float,
        on: Placement,
    ):
        super().__init__()
        self.tp = on.tp
        sharding = ParamSharding(name=name, shape=(out_features, in_features), dim=1, init_std=init_std)
        self.weight = on.parameter(sharding)

    def forward(self, x: Tensor) -> Tensor:
        return leave_region(_Linear.apply(x, self.weight), self.tp)
