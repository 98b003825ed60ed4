"""Causal attention as matrix products over blocks of queries, for CPUs, where it may be faster than torch's SDPA.

Queries i to j see keys 0 to j, so block by block half of the scores are never computed::

    keys      0 . . . . . S
    block 0   x
    block 1   x x             x: a tile of scores; the last one of a block has a mask
    block 2   x x x

Scores and their gradients are in fp32 also for 16-bit inputs, since a rounded score of 16 would be off by 3 %;
probabilities are rounded before they meet the values, as in SDPA. The backward pass computes them again (Dao et al.
2022, section 3.1, of which this has neither the tiles of keys nor the running maximum). Which form is faster depends
on the machine, the format and the shape: `worker/attention_timing.py` measures it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d.kernels.layer_kernels import TORCH_KERNELS, AttentionKernels

SCORES_AT_ONCE = 1 << 18
"""Scores that several heads compute at once: 1 MiB in fp32, which second-level caches hold."""


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, *, kernels: AttentionKernels = TORCH_KERNELS.attention) -> Tensor:
    """Causal attention: q (batch, heads, seq, size), k and v (batch, key-value heads, seq, size) -> as q."""
    batch_size, num_heads, length, size = q.shape
    num_units = batch_size * k.shape[1]  # key-value heads of all sequences; a group of query heads belongs to each
    grouped = q.reshape(num_units, num_heads // k.shape[1], length, size)
    k, v = (each.reshape(num_units, length, size) for each in (k, v))
    mixed = _BlockAttention.apply(grouped, k, v, kernels)
    return mixed.view(q.shape)


class _Block(NamedTuple):
    """Some units' queries `begin` to `end`, which see the keys before `end`."""

    units: slice
    begin: int
    end: int


class _BlockAttention(torch.autograd.Function):
    """q (units, group, seq, size), k and v (units, seq, size) -> as q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernels: AttentionKernels) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.kernels = kernels
        scale, prepared_k = q.shape[-1] ** -0.5, kernels.prepare_keys(k)
        mixed = torch.empty_like(q)
        for block in _blocks(q):
            units, begin, end = block
            scores = kernels.multiply_rows(_rows(q, block), prepared_k, units, end, scale)
            _, rounded = kernels.softmax(scores, end - begin, q.dtype)
            mixed[units, :, begin:end] = torch.bmm(rounded, v[units, :end]).view(mixed[units, :, begin:end].shape)
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        grad, scale = grad.contiguous(), q.shape[-1] ** -0.5
        kernels, wide_dtype = ctx.kernels, torch.promote_types(q.dtype, torch.float32)
        prepared_k, prepared_v = kernels.prepare_keys(k), kernels.prepare_keys(v)
        q_grad, k_grad, v_grad = torch.empty_like(q), *(torch.zeros_like(each, dtype=wide_dtype) for each in (k, v))
        for block in _blocks(q):
            units, begin, end = block
            rows, rows_grad = _rows(q, block), _rows(grad, block)
            scores = kernels.multiply_rows(rows, prepared_k, units, end, scale)
            probabilities, rounded = kernels.softmax(scores, end - begin, q.dtype)
            v_grad[units, :end].add_(torch.bmm(rounded.transpose(1, 2), rows_grad))
            scores_grad = kernels.multiply_rows(rows_grad, prepared_v, units, end, 1.0)
            scores_grad = kernels.softmax_grads(scores_grad, probabilities, q.dtype)
            block_grad = torch.bmm(scores_grad, k[units, :end])
            q_grad[units, :, begin:end] = block_grad.view(q_grad[units, :, begin:end].shape)
            k_grad[units, :end].add_(torch.bmm(scores_grad.transpose(1, 2), rows))
        return q_grad.mul_(scale), k_grad.mul_(scale).to(k.dtype), v_grad.to(v.dtype), None


def _blocks(q: Tensor) -> Iterator[_Block]:
    """All blocks of q (units, group, seq, size), those of the same units one after the other."""
    num_units, group, length, _ = q.shape
    num_rows = 128 if q.dtype.itemsize == 2 else 64  # tried: 64, 128 and 256
    num_at_once = max(1, SCORES_AT_ONCE // (group * min(num_rows, length) * length))
    for first in range(0, num_units, num_at_once):
        for begin in range(0, length, num_rows):
            yield _Block(slice(first, first + num_at_once), begin, min(begin + num_rows, length))


def _rows(x: Tensor, block: _Block) -> Tensor:
    """The block's rows of x (units, group, seq, size): (some units, group * rows, size)."""
    return x[block.units, :, block.begin : block.end].flatten(1, 2)
