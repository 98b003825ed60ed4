"""Column- and row-parallel matrix products (Megatron-LM: Shoeybi et al., section 3), with or without biases.

A column-parallel weight is sharded along its output, a row-parallel one along its input, so that a pair of them needs
one sum forward and one backward. The gradient of the weight is added directly to its main gradient (`gradient_sink.py`)
while the sum of the input's gradient is under way. If a split backward pass defers it, the whole input is kept for it:
under sequence parallelism the gathered one, so that the deferred half needs no other rank.

A column-parallel bias is sharded like its output. A row-parallel one is added once, after the sum, by every rank to the
tokens that it has: if tokens are sharded its gradient is partial, like a norm's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from parallel3d.accelerator import is_accelerator
from parallel3d.kernels.layer_kernels import IDENTITY, Activation, SumRowsFn
from parallel3d.layers.apply_function import apply_function
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.output_rounding import MatmulFn, matmul_for
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.group import DoneWork
from parallel3d.parallel.sharding import FusedBlock, ParamSharding
from parallel3d.parallel.tensor_parallel import TensorParallel


class _ColumnParallel(Function):
    """All-gather (or nothing), GEMM forward; GEMM, reduce-scatter (or all-reduce) during the weight's GEMM backward.

    The input is gathered again for the backward pass (Korthikanti et al., section 4.2.2), under the GEMM of its
    gradient. On a CPU the same cores would copy it: there it is kept, unless the layer is recomputed to save memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ShardedParameter,
        bias: ShardedParameter | None,
        tp: TensorParallel,
        multiply: MatmulFn,
        sum_rows: SumRowsFn,
    ) -> Tensor:
        context = tp.recompute_context
        ctx.has_whole = not (context.is_active or is_accelerator(x.device))
        if ctx.has_whole:
            x = tp.gather(x)
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.tp, ctx.sum_rows = weight, bias, tp, sum_rows
        return context.run(lambda: multiply(x if ctx.has_whole else tp.gather(x), weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        whole, gathering = (x, DoneWork()) if ctx.has_whole else ctx.tp.gather_async(x)
        input_grad, summing = ctx.tp.sum_async(ctx.weight.gemm.input_grad(grad, ctx.weight))
        if ctx.bias is not None:
            add_bias_grad(ctx.bias, grad, ctx.sum_rows)
        gathering.wait()
        ctx.weight.sink.add_product(grad, whole)
        summing.wait()
        return input_grad, None, None, None, None, None


class _RowParallel(Function):
    """Activation, GEMM, all-reduce (or reduce-scatter) forward; nothing (or all-gather), GEMM, activation backward.

    Of the activation only the input is kept, if its backward pass computes the GEMM's input again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ShardedParameter,
        bias: ShardedParameter | None,
        activation: Activation,
        tp: TensorParallel,
        multiply: MatmulFn,
        sum_rows: SumRowsFn,
    ) -> Tensor:
        kept = activation.forward(x) if activation.keeps_result else None
        ctx.save_for_backward(x, kept)
        ctx.weight, ctx.bias, ctx.activation, ctx.tp, ctx.sum_rows = weight, bias, activation, tp, sum_rows

        def product() -> Tensor:
            activated = activation.forward(x) if kept is None else kept
            if tp.group.size == 1:  # a GPU then adds the bias within the product
                return multiply(activated, weight, bias)
            result = tp.sum(multiply(activated, weight, None))
            return result if bias is None else result.add_(bias)

        return tp.recompute_context.run(product)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, kept = ctx.saved_tensors
        if ctx.bias is not None:
            add_bias_grad(ctx.bias, grad, ctx.sum_rows)
        grad = ctx.tp.gather(grad)
        input_grad, activated = ctx.activation.backward(ctx.weight.gemm.input_grad(grad, ctx.weight), x, kept)
        ctx.weight.sink.add_product(grad, activated)
        return input_grad, None, None, None, None, None, None


class ColumnParallelLinear(nn.Module):
    """(tokens, in) -> (tokens, out_local). Weight (out_local, in) and bias are sharded inside each fused block."""

    def __init__(
        self,
        name: str,
        in_features: int,
        fused_blocks: tuple[FusedBlock, ...],
        *,
        init_std: float,
        bias: bool = False,
        context: LayerContext,
    ):
        super().__init__()
        self.tp, self.policy, self.sum_rows = context.tp, context.policy, context.kernels.sum_rows
        out_features = sum(block.size for block in fused_blocks)
        weight = ParamSharding(
            name=f"{name}.weight",
            shape=(out_features, in_features),
            dim=0,
            fused_blocks=fused_blocks,
            init_std=init_std,
        )
        self.weight = context.parameter(weight)
        self.bias: ShardedParameter | None = None
        if bias:
            self.bias = context.parameter(bias_sharding(f"{name}.bias", out_features, dim=0, fused_blocks=fused_blocks))

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        multiply = matmul_for(self.weight, micro_batch, tp=self.tp, policy=self.policy)
        return apply_function(_ColumnParallel, x, self.weight, self.bias, self.tp, multiply, self.sum_rows)


class RowParallelLinear(nn.Module):
    """(tokens, in_local) -> (tokens, out), summed over the group; with sharded tokens each rank keeps its own.

    `activation` is applied to the input in front of the product, and may change its width to in_local.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        init_std: float,
        bias: bool = False,
        activation: Activation = IDENTITY,
        context: LayerContext,
    ):
        super().__init__()
        self.tp, self.policy, self.activation = context.tp, context.policy, activation
        self.sum_rows = context.kernels.sum_rows
        weight = ParamSharding(name=f"{name}.weight", shape=(out_features, in_features), dim=1, init_std=init_std)
        self.weight = context.parameter(weight)
        self.bias: ShardedParameter | None = None
        if bias:
            self.bias = context.parameter(
                bias_sharding(f"{name}.bias", out_features, partial_grad=context.tp.is_token_sharded)
            )

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        multiply = matmul_for(self.weight, micro_batch, tp=self.tp, policy=self.policy)
        return apply_function(
            _RowParallel, x, self.weight, self.bias, self.activation, self.tp, multiply, self.sum_rows
        )


def bias_sharding(
    name: str,
    size: int,
    *,
    dim: int | None = None,
    fused_blocks: tuple[FusedBlock, ...] = (),
    partial_grad: bool = False,
) -> ParamSharding:
    """A bias (size,), initially zero."""
    return ParamSharding(
        name=name,
        shape=(size,),
        dim=dim,
        fused_blocks=fused_blocks,
        partial_grad=partial_grad,
        init_std=0.0,
        is_norm_or_bias=True,
    )


def add_bias_grad(bias: ShardedParameter, grad: Tensor, sum_rows: SumRowsFn) -> None:
    """Adds the sum over tokens of grad (tokens, out) to the bias' main gradient."""
    bias.sink.add(sum_rows(grad, bias.sink.dtype))
