"""Rotary position embedding (Su et al., RoFormer) in the half-split form of the Llama family, as torch operators: the
definition.

The split of the fused projection into q, k and v and the rotation are one operation: its backward pass writes the
gradients of all three into the one buffer that the projection's products read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """The rows of this rank's fused projection: query heads, then key heads, then value heads."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int

    @staticmethod
    def of_rank(tp_size: int, num_heads: int, num_kv_heads: int, head_size: int) -> HeadLayout:
        """Of one of `tp_size` ranks that share these heads."""
        return HeadLayout(
            num_query_heads=num_heads // tp_size, num_kv_heads=max(1, num_kv_heads // tp_size), head_size=head_size
        )

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


def split_and_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: HeadLayout, *, may_overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv (batch, seq, q + k + v), cos and sin (seq, head size / 2) -> rotated q (batch, seq, query heads, size),
    rotated k and v (.., kv heads, size). They may lie in qkv itself if that may be overwritten; here they don't: CPUs
    read them in this order faster."""
    q, k, v = split_heads(qkv, heads)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v.clone()


def packed_grads(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, heads: HeadLayout) -> Tensor:
    """The gradient of qkv (batch, seq, q + k + v): dq and dk rotated back, and dv."""
    grad = dq.new_empty((*dq.shape[:2], heads.query_size + 2 * heads.kv_size))
    gq, gk, gv = split_heads(grad, heads)
    _rotate(dq, cos, -sin, out=gq)
    _rotate(dk, cos, -sin, out=gk)
    gv.copy_(dv)
    return grad


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), a and b being the halves of the last dimension."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for all heads
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
