"""Causal attention as matrix products over blocks of queries: the definition, as torch operators.

Queries i to j see keys 0 to j, so block by block half of the scores are never computed::

    keys      0 . . . . . S
    block 0   x
    block 1   x x             x: a tile of scores; the last one of a block has a mask
    block 2   x x x

Scores and their gradients are in fp32 also for 16-bit inputs, since a rounded score of 16 would be off by 3 %;
probabilities are rounded before they meet the values, as in SDPA. The backward pass computes them again (Dao et al.
2022, section 3.1, of which this has neither the tiles of keys nor the running maximum).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SCORES_AT_ONCE = 1 << 18
"""Scores that several heads compute at once: 1 MiB in fp32, which second-level caches hold."""


class _Block(NamedTuple):
    """Some units' queries `begin` to `end`, which see the keys before `end`."""

    units: slice
    begin: int
    end: int


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (units, group, seq, size), k and v (units, seq, size) -> as q; a group of query heads shares a unit's keys."""
    wide_k, mixed = _wide(k), torch.empty_like(q)
    for block in _blocks(q):
        units, begin, end = block
        rounded = _probabilities(_rows(q, block), wide_k, block).to(q.dtype)
        mixed[units, :, begin:end] = torch.bmm(rounded, v[units, :end]).view(mixed[units, :, begin:end].shape)
    return mixed


def attention_grads(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v for that of the result."""
    wide_k, wide_v, scale = _wide(k), _wide(v), q.shape[-1] ** -0.5
    q_grad, k_grad, v_grad = torch.empty_like(q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    for block in _blocks(q):
        units, begin, end = block
        rows, rows_grad = _rows(q, block), _rows(grad, block)
        probabilities = _probabilities(rows, wide_k, block)
        v_grad[units, :end].add_(torch.bmm(probabilities.to(q.dtype).transpose(1, 2), rows_grad))
        scores_grad = torch.bmm(_wide(rows_grad), wide_v[units, :end].transpose(1, 2))
        scores_grad = torch._softmax_backward_data(scores_grad, probabilities, -1, scores_grad.dtype).to(q.dtype)
        q_grad[units, :, begin:end] = torch.bmm(scores_grad, k[units, :end]).view(q_grad[units, :, begin:end].shape)
        k_grad[units, :end].add_(torch.bmm(scores_grad.transpose(1, 2), rows))
    return q_grad.mul_(scale), k_grad.mul_(scale).to(k.dtype), v_grad.to(v.dtype)


def _probabilities(rows: Tensor, wide_k: Tensor, block: _Block) -> Tensor:
    """Of rows (some units, group * queries, size), for all keys before the block's end, at least in fp32."""
    units, begin, end = block
    scores = torch.bmm(_wide(rows) * rows.shape[-1] ** -0.5, wide_k[units, :end].transpose(1, 2))
    later = scores.new_full((end - begin, end - begin), float("-inf")).triu_(1)
    scores.unflatten(1, (-1, end - begin))[..., begin:].add_(later)
    return torch.softmax(scores, -1)


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


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x
