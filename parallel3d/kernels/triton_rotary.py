"""Rotary positions of a fused projection, one kernel forward and one backward; a program has a part of a token's heads.

Forward the kernel rotates q and k where they lie, if they may be overwritten; v stays where it is in any case.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel3d.kernels.torch_rotary import split_heads
from parallel3d.kernels.triton_math import WIDE, warps_for, wide_dtype

BLOCK = 1024
"""Pairs (a, b) of a program."""


def split_and_rotate(launch, qkv, cos, sin, heads, *, may_overwrite):
    qkv, (batch_size, seq, width) = qkv.contiguous(), qkv.shape
    half, rotated_size = heads.head_size // 2, heads.query_size + heads.kv_size
    rotated = qkv[..., :rotated_size]
    if not may_overwrite:
        rotated = torch.empty((batch_size, seq, rotated_size), dtype=qkv.dtype, device=qkv.device)
    launch(
        _rotate,
        (batch_size * seq, triton.cdiv(rotated_size // 2, BLOCK)),
        [qkv, cos, sin, rotated, seq],
        reads=[qkv[..., :rotated_size], cos, sin],
        writes=[rotated],
        STRIDE=width,
        ROTATED_STRIDE=rotated.stride(1),
        NUM_PAIRS=rotated_size // 2,
        HALF=half,
        BLOCK=BLOCK,
        WIDE=WIDE[wide_dtype(cos.dtype)],
        num_warps=warps_for(BLOCK),
    )
    q, k = rotated.split([heads.query_size, heads.kv_size], dim=-1)
    _, _, v = split_heads(qkv, heads)
    return q.unflatten(-1, (-1, heads.head_size)), k.unflatten(-1, (-1, heads.head_size)), v


def packed_grads(launch, dq, dk, dv, cos, sin, heads):
    dq, dk, dv = (each if each.stride(-1) == 1 else each.contiguous() for each in (dq, dk, dv))
    (batch_size, seq), width = dq.shape[:2], heads.query_size + 2 * heads.kv_size
    grad = torch.empty((batch_size, seq, width), dtype=dq.dtype, device=dq.device)
    launch(
        _packed_grads,
        (batch_size * seq, triton.cdiv(width // 2, BLOCK)),
        [dq, dk, dv, cos, sin, grad, seq, *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3]],
        reads=[dq, dk, dv, cos, sin],
        writes=[grad],
        NUM_QUERY_HEADS=heads.num_query_heads,
        NUM_KV_HEADS=heads.num_kv_heads,
        HALF=heads.head_size // 2,
        BLOCK=BLOCK,
        WIDE=WIDE[wide_dtype(cos.dtype)],
        num_warps=warps_for(BLOCK),
    )
    return grad


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    result,
    seq,
    STRIDE: tl.constexpr,
    ROTATED_STRIDE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """(a, b) -> (a cos - b sin, b cos + a sin) for pairs of one token; result may be x."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < NUM_PAIRS
    column = pair // HALF * (2 * HALF) + pair % HALF
    angle = (row % seq) * HALF + pair % HALF
    c = tl.load(cos + angle, mask=mask, other=0.0).to(WIDE)
    s = tl.load(sin + angle, mask=mask, other=0.0).to(WIDE)
    a = tl.load(x + row * STRIDE + column, mask=mask, other=0.0).to(WIDE)
    b = tl.load(x + row * STRIDE + column + HALF, mask=mask, other=0.0).to(WIDE)
    at = result + row * ROTATED_STRIDE + column
    tl.store(at, (a * c - b * s).to(result.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (b * c + a * s).to(result.dtype.element_ty), mask=mask)


@triton.jit
def _packed_grads(
    dq,
    dk,
    dv,
    cos,
    sin,
    grad,
    seq,
    dq_batch,
    dq_token,
    dq_head,
    dk_batch,
    dk_token,
    dk_head,
    dv_batch,
    dv_token,
    dv_head,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Pairs of one token's q, k and v: those of q and k rotated back by (a cos + b sin, b cos - a sin)."""
    row = tl.program_id(0).to(tl.int64)
    sequence, position = row // seq, row % seq
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head, offset = pair // HALF, pair % HALF
    is_q = head < NUM_QUERY_HEADS
    is_k = (head >= NUM_QUERY_HEADS) & (head < NUM_QUERY_HEADS + NUM_KV_HEADS)
    is_v = (head >= NUM_QUERY_HEADS + NUM_KV_HEADS) & (head < NUM_QUERY_HEADS + 2 * NUM_KV_HEADS)
    q_at = dq + sequence * dq_batch + position * dq_token + head * dq_head + offset
    k_at = dk + sequence * dk_batch + position * dk_token + (head - NUM_QUERY_HEADS) * dk_head + offset
    v_at = dv + sequence * dv_batch + position * dv_token + (head - NUM_QUERY_HEADS - NUM_KV_HEADS) * dv_head + offset
    a = tl.load(q_at, mask=is_q, other=0.0) + tl.load(k_at, mask=is_k, other=0.0) + tl.load(v_at, mask=is_v, other=0.0)
    b = tl.load(q_at + HALF, mask=is_q, other=0.0) + tl.load(k_at + HALF, mask=is_k, other=0.0)
    b += tl.load(v_at + HALF, mask=is_v, other=0.0)
    a, b = a.to(WIDE), b.to(WIDE)
    angle, is_rotated = position * HALF + offset, is_q | is_k
    c = tl.load(cos + angle, mask=is_rotated, other=1.0).to(WIDE)
    s = tl.load(sin + angle, mask=is_rotated, other=0.0).to(WIDE)
    mask = head < NUM_QUERY_HEADS + 2 * NUM_KV_HEADS
    at = grad + row * (NUM_QUERY_HEADS + 2 * NUM_KV_HEADS) * (2 * HALF) + head * (2 * HALF) + offset
    tl.store(at, (a * c + b * s).to(grad.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (b * c - a * s).to(grad.dtype.element_ty), mask=mask)
