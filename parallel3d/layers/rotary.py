"""Rotary position embedding (Su et al., RoFormer) in the half-split form of the Llama family.

One table serves all layers. The split of the fused projection into q, k, v and the rotation are one autograd function:
its backward writes the gradients of all three into the one buffer that the projection's GEMM reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin of position x frequency: (max positions, head size / 2) each."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def build(num_positions: int, head_size: int, theta: float, dtype: torch.dtype, device: str = "cpu") -> RotaryTable:
        inverse = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), inverse)
        return RotaryTable(angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device))


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """The rows of this rank's fused projection: query heads, then key heads, then value heads."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def query_size(self) -> int:
        return self.num_query_heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_size


def split_heads(qkv: Tensor, heads: HeadLayout) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, seq, q + k + v) -> views q (batch, seq, query heads, size), k and v (.., kv heads, size)."""
    q, k, v = qkv.split([heads.query_size, heads.kv_size, heads.kv_size], dim=-1)
    return (
        q.unflatten(-1, (heads.num_query_heads, heads.head_size)),
        k.unflatten(-1, (heads.num_kv_heads, heads.head_size)),
        v.unflatten(-1, (heads.num_kv_heads, heads.head_size)),
    )


class _SplitRotate(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, table: RotaryTable, heads: HeadLayout, batch_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.heads, ctx.shape = heads, qkv.shape
        seq = qkv.shape[0] // batch_size
        cos, sin = table.cos[:seq, None], table.sin[:seq, None]  # (seq, 1, head size / 2)
        ctx.save_for_backward(cos, sin)
        q, k, v = split_heads(qkv.view(batch_size, seq, -1), heads)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v.clone()

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad = dq.new_empty((dq.shape[0], dq.shape[1], ctx.shape[-1]))
        gq, gk, gv = split_heads(grad, ctx.heads)
        _rotate(dq, cos, -sin, out=gq)
        _rotate(dk, cos, -sin, out=gk)
        gv.copy_(dv)
        return grad.view(ctx.shape), None, None, None


def rotated_heads(qkv: Tensor, table: RotaryTable, heads: HeadLayout, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """`split_and_rotate` as a formula for a compiler, which differentiates it and makes one kernel of it."""
    seq = qkv.shape[0] // batch_size
    cos, sin = table.cos[:seq, None], table.sin[:seq, None]

    def rotate(x: Tensor) -> Tensor:
        a, b = x.to(cos.dtype).chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    q, k, v = split_heads(qkv.view(batch_size, seq, -1), heads)
    return rotate(q), rotate(k), v.clone()


def split_and_rotate(
    qkv: Tensor, table: RotaryTable, heads: HeadLayout, batch_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(batch * seq, q + k + v) -> rotated q (batch, seq, query heads, size), rotated k and v (.., kv heads, size)."""
    return _SplitRotate.apply(qkv, table, heads, batch_size)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), a and b being the halves of the last dimension."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    a, b = x.chunk(2, -1)
    out_a, out_b = out.chunk(2, -1)
    if x.dtype == cos.dtype:
        torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    else:
        a, b = a.to(cos.dtype), b.to(cos.dtype)
        out_a.copy_(a * cos - b * sin)
        out_b.copy_(b * cos + a * sin)
    return out
