"""Rotary positions of a fused projection by loops in C (`torch_rotary.py` defines them).

q, k and v come out head by head, as (batch, heads, seq, size) in memory: attention's products read them as they are.
"""

from __future__ import annotations

from torch import Tensor

from parallel3d.kernels import torch_rotary
from parallel3d.kernels.c_loops import fits_c_loops, is_narrow, run_layer_loop
from parallel3d.kernels.torch_rotary import HeadLayout, split_heads


def split_and_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: HeadLayout, *, may_overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `torch_rotary.split_and_rotate`."""
    if not fits_c_loops(qkv, cos.dtype):
        return torch_rotary.split_and_rotate(qkv, cos, sin, heads, may_overwrite=may_overwrite)
    batch, length = qkv.shape[:2]
    found = []
    for part, sign in zip(split_heads(qkv, heads), (1.0, 1.0, 0.0)):
        out = qkv.new_empty((batch, part.shape[2], length, heads.head_size)).transpose(1, 2)
        _rotate(part, out, cos, sin, sign)
        found.append(out)
    return found[0], found[1], found[2]


def packed_grads(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, heads: HeadLayout) -> Tensor:
    """The gradient of qkv (batch, seq, q + k + v): dq and dk rotated back, and dv."""
    if not fits_c_loops(dq, cos.dtype):
        return torch_rotary.packed_grads(dq, dk, dv, cos, sin, heads)
    grad = dq.new_empty((*dq.shape[:2], heads.query_size + 2 * heads.kv_size))
    for part, out, sign in zip((dq, dk, dv), split_heads(grad, heads), (-1.0, -1.0, 0.0)):
        _rotate(part, out, cos, sin, sign)
    return grad


def _rotate(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    """x and out (batch, seq, heads, size) may be views; sign 0: a copy."""
    x = x if x.stride(3) == 1 else x.contiguous()
    ends = (x.data_ptr(), *x.stride()[:3], out.data_ptr(), *out.stride()[:3])
    run_layer_loop("rotate", *ends, cos.contiguous(), sin.contiguous(), sign, *x.shape, is_narrow(x))
