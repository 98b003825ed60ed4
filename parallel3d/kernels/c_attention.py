"""Causal attention by blocks of queries in C, one call each way (`torch_attention.py` defines it).

attention_loops.c needs AVX-512, or AVX2 with FMA, and for bf16 instructions that multiply such numbers with results in
fp32, which torch's products on CPUs have not: those of AMX, else those of AVX512 BF16. With neither, bf16 numbers are
widened to fp32 and the results rounded. Other processors, formats and sizes of heads take torch's form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.kernels import torch_attention
from parallel3d.kernels.c_loops import has_attention_loop, has_tiles, is_narrow, run_attention_loop

_QUERIES, _TILE, _LANES = 64, 64, 16
"""Of attention_products.h: rows and columns of scores at a time, and numbers of a vector."""
_MAX_SIZE = 512
_TILES, _TILE_SIZE = 2, 32
"""AMX, which multiplies bf16 numbers of whole tiles."""


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (batch, key-value heads, group, seq, size), k and v (batch, key-value heads, seq, size) -> (batch, seq, query
    heads, size)."""
    if _is_widened(q):
        return attention(q.float(), k.float(), v.float()).to(q.dtype)
    if not _fits(q):
        return torch_attention.attention(q, k, v)
    batch, kv_heads, group, length, size = q.shape
    mixed = q.new_empty((batch, length, kv_heads * group, size))
    run_attention_loop("attention", q.contiguous(), k.contiguous(), v.contiguous(), mixed, *_space_and_sizes(q))
    return mixed


def attention_grads(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v for that of the result; sums are in fp32 and rounded once."""
    if _is_widened(q):
        q_grad, k_grad, v_grad = attention_grads(grad.float(), q.float(), k.float(), v.float())
        return q_grad.to(q.dtype), k_grad.to(q.dtype), v_grad.to(q.dtype)
    if not _fits(q):
        return torch_attention.attention_grads(grad, q, k, v)
    factors = [each.contiguous() for each in (grad, q, k, v)]
    found = [torch.empty_like(each) for each in factors[1:]]
    run_attention_loop("attention_grads", *factors, *found, *_space_and_sizes(q))
    return found[0], found[1], found[2]


def _space_and_sizes(q: Tensor) -> tuple[Tensor, int, int, int, int, int, int, float, int]:
    """The last arguments: memory for each thread, and what all units have in common."""
    batch, kv_heads, group, length, size = q.shape
    padded = -(-length // _TILE) * _TILE
    stride = padded + 2 * _LANES
    space_size = 3 * padded * size + 5 * _QUERIES * size + 4 * _QUERIES * stride + 2 * size * stride
    space = torch.empty((torch.get_num_threads(), space_size), dtype=torch.float32)
    return space, space_size, batch * kv_heads, kv_heads, group, length, size, size**-0.5, _format_of(q)


def _format_of(q: Tensor) -> int:
    """The loops' argument `narrow`."""
    return _TILES if is_narrow(q) and q.shape[-1] % _TILE_SIZE == 0 and has_tiles() else is_narrow(q)


def _is_widened(q: Tensor) -> bool:
    """Whether bf16 numbers are widened to fp32, since the processor has instructions for these alone."""
    is_bf16 = q.dtype is torch.bfloat16 and q.device.type == "cpu"
    return is_bf16 and not has_attention_loop(torch.bfloat16) and _fits(q, torch.float32)


def _fits(q: Tensor, dtype: torch.dtype | None = None) -> bool:
    size = q.shape[-1]
    return (
        q.device.type == "cpu" and size % _LANES == 0 and size <= _MAX_SIZE and has_attention_loop(dtype or q.dtype)
    )
