"""RMSNorm of queries and keys in front of the rotation (Henry et al. 2020, "Query-key normalization for transformers";
Dehghani et al. 2023, "Scaling vision transformers to 22 billion parameters").

Of each head (Qwen3, Gemma 3) it is local to a rank: heads are the rows of the layers' RMSNorm kernels, and every rank
holds the weight of one head's width, with the gradient of its own heads. Of all heads together (OLMo 2) a rank has a
part of each row: the sums of squares, and backward the inner products, are added up over the tensor-parallel group, two
numbers a token. Ranks that hold copies of a key head add it to the sum as often as there are copies, which the sum is
then divided by; the gradient of a copy is that of its own query heads, as in the projection's weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from parallel3d.kernels.torch_rotary import HeadLayout
from parallel3d.layers.norm import norm_weight
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.sharding import FusedBlock, ParamSharding
from parallel3d.parallel.tensor_parallel import TensorParallel


class HeadNorm(nn.Module):
    """qkv (tokens, q + k + v) -> the same in memory of its own, each head of q and k normed by itself.

    Weights are `offset` plus the parameters.
    """

    def __init__(self, name: str, heads: HeadLayout, *, eps: float, offset: float = 0.0, context: LayerContext):
        super().__init__()
        self.heads, self.eps, self.offset = heads, eps, offset
        self.kernels, self.wide_dtype = context.kernels.rms_norm, context.policy.keep_fp32_dtype
        self.q_norm, self.k_norm = (self._weight(f"{name}.{part}_norm.weight", context) for part in "qk")

    def _weight(self, name: str, context: LayerContext) -> ShardedParameter:
        return context.parameter(
            ParamSharding(
                name=name,
                shape=(self.heads.head_size,),
                partial_grad=context.tp.group.size > 1,
                init_std=0.0 if self.offset else None,
                is_norm_or_bias=True,
            )
        )

    def forward(self, qkv: Tensor) -> Tensor:
        return _NormHeads.apply(qkv, self)


class _NormHeads(Function):
    """Saves its input and a statistic of each head; adds the weights' gradients to their main gradients."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, norm: HeadNorm) -> Tensor:
        parts, result = _split(qkv, norm.heads), torch.empty_like(qkv)
        *normed, values = _split(result, norm.heads)
        statistics: list[Tensor] = []
        for part, weight, out in zip(parts, (norm.q_norm, norm.k_norm), normed):
            rows = _rows(part, norm.heads)
            found = norm.kernels.forward(rows, None, (norm_weight(weight, norm.offset),), norm.eps, norm.wide_dtype)
            out.copy_(found.y.view_as(out))
            statistics.extend(found.statistics)
        values.copy_(parts[2])
        ctx.norm = norm
        ctx.save_for_backward(qkv, *statistics)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (qkv, *statistics), norm = ctx.saved_tensors, ctx.norm
        result = torch.empty_like(qkv)
        (q, k, _), grads, outs = _split(qkv, norm.heads), _split(grad, norm.heads), _split(result, norm.heads)
        for part, part_grad, out, scale, weight in zip((q, k), grads, outs, statistics, (norm.q_norm, norm.k_norm)):
            rows, rows_grad = _rows(part, norm.heads), _rows(part_grad, norm.heads)
            value = norm_weight(weight, norm.offset)
            found = norm.kernels.backward(rows_grad, rows, (scale,), (value,), None)
            out.copy_(found.total.view_as(out))
            weight.sink.add(found.parameters[0])
        outs[2].copy_(grads[2])
        return result, None


class ProjectionNorm(nn.Module):
    """qkv (tokens, q + k + v) -> the same in memory of its own, all of q normed together, and all of k."""

    def __init__(
        self, name: str, heads: HeadLayout, *, num_heads: int, num_kv_heads: int, eps: float, context: LayerContext
    ):
        super().__init__()
        self.heads, self.eps, self.tp = heads, eps, context.tp
        self.wide_dtype = context.policy.keep_fp32_dtype
        blocks = [
            FusedBlock(name="q_norm", size=num_heads * heads.head_size),
            FusedBlock(name="k_norm", size=num_kv_heads * heads.head_size, max_parts=num_kv_heads),
        ]
        self.q_norm, self.k_norm = (
            context.parameter(
                ParamSharding(
                    name=f"{name}.{block.name}.weight",
                    shape=(block.size,),
                    dim=0,
                    fused_blocks=(block,),
                    is_norm_or_bias=True,
                )
            )
            for block in blocks
        )
        copies = [block.copies(context.tp.group.size) for block in blocks]
        self.widths = [block.size * number for block, number in zip(blocks, copies)]
        """The numbers of q and of k on all ranks together, copies included."""

    def forward(self, qkv: Tensor) -> Tensor:
        return _NormProjections.apply(qkv, self, self.tp)

    def means(self, sums: list[Tensor], tp: TensorParallel) -> list[Tensor]:
        """The means over all of q and all of k from this rank's sums, (tokens, 1) each."""
        both = torch.cat(sums, 1)
        tp.group.all_reduce(both)
        return [both[:, i : i + 1] / width for i, width in enumerate(self.widths)]


class _NormProjections(Function):
    """Saves its input and two statistics of each token; adds the weights' gradients to their main gradients."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, norm: ProjectionNorm, tp: TensorParallel) -> Tensor:
        q, k, v = _split(qkv, norm.heads)
        wide = [part.to(norm.wide_dtype) for part in (q, k)]

        def scales() -> Tensor:
            means = norm.means([part.square().sum(1, keepdim=True) for part in wide], tp)
            return (torch.cat(means, 1) + norm.eps).rsqrt_()

        found = tp.recompute_context.run(scales)
        result = torch.empty_like(qkv)
        *normed, values = _split(result, norm.heads)
        for i, (part, weight) in enumerate(zip(wide, (norm.q_norm, norm.k_norm))):
            normed[i].copy_(part * found[:, i : i + 1] * weight.detach().to(norm.wide_dtype))
        values.copy_(v)
        ctx.norm, ctx.tp = norm, tp
        ctx.save_for_backward(qkv, found)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (qkv, scales), norm = ctx.saved_tensors, ctx.norm
        result, wide_dtype = torch.empty_like(qkv), norm.wide_dtype
        outs, grads = _split(result, norm.heads), _split(grad, norm.heads)
        normed, weighted = [], []
        for i, (part, weight) in enumerate(zip(_split(qkv, norm.heads), (norm.q_norm, norm.k_norm))):
            normed.append(part.to(wide_dtype) * scales[:, i : i + 1])
            wide_grad = grads[i].to(wide_dtype)
            weight.sink.add((wide_grad * normed[i]).sum(0))
            weighted.append(wide_grad * weight.detach().to(wide_dtype))
        inner = norm.means([(each * n).sum(1, keepdim=True) for each, n in zip(weighted, normed)], ctx.tp)
        for i, out in enumerate(outs[:2]):
            out.copy_((weighted[i] - normed[i] * inner[i]) * scales[:, i : i + 1])
        outs[2].copy_(grads[2])
        return result, None, None


def _rows(part: Tensor, heads: HeadLayout) -> Tensor:
    """(tokens * heads, size), next to each other in memory: those of a single head are a view with gaps."""
    return part.reshape(-1, heads.head_size).contiguous()


def _split(qkv: Tensor, heads: HeadLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Views (tokens, all heads' numbers) of q, k and v."""
    q, k, v = qkv.split([heads.query_size, heads.kv_size, heads.kv_size], dim=-1)
    return q, k, v
