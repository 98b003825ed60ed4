"""Causal attention as matrix products over blocks of queries: the definition, as torch operators.

Queries i to j see keys 0 to j, so block by block half of the scores are never computed::

    keys      0 . . . . . S
    block 0   x
    block 1   x x             x: a tile of scores; the last one of a block has a mask
    block 2   x x x

Scores and their gradients are in fp32 also for 16-bit inputs, since a rounded score of 16 would be off by 3 %;
probabilities are rounded before they meet the values, as in SDPA. The backward pass computes them again (Dao et al.
2022, section 3.1, of which this has neither the tiles of keys nor the running maximum).

With a window of w keys a block begins at the first key that its first query sees. With a cap c, scores x become
c tanh(x / c) (Gemma team 2024), which fused kernels don't know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SCORES_AT_ONCE = 1 << 18
"""Scores that several heads compute at once: 1 MiB in fp32, which second-level caches hold."""


class _Block(NamedTuple):
    """Some units' queries `begin` to `end`, which see keys from `first` on, before `end`."""

    units: slice
    first: int
    begin: int
    end: int

    @property
    def keys(self) -> slice:
        return slice(self.first, self.end)


class ScoreForm(NamedTuple):
    """The part of the keys that a query sees, and the function of its scores."""

    window: int | None = None
    """Keys that a query sees, its own included; None: all before it."""
    cap: float | None = None
    """c of c tanh(x / c); None: they stay."""


PLAIN = ScoreForm()


def attention(q: Tensor, k: Tensor, v: Tensor, form: ScoreForm = PLAIN) -> Tensor:
    """q (batch, key-value heads, group, seq, size), k and v (batch, key-value heads, seq, size) -> (batch, seq, query
    heads, size). A unit is a key-value head of a sequence, whose keys and values a group of query heads shares."""
    mixed = _attention_of_units(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), form)
    return mixed.view(q.shape).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous()


def _attention_of_units(q: Tensor, k: Tensor, v: Tensor, form: ScoreForm) -> Tensor:
    """q (units, group, seq, size), k and v (units, seq, size) -> as q."""
    wide_k, mixed = _wide(k), torch.empty_like(q, memory_format=torch.contiguous_format)
    for block in _blocks(q, form.window):
        units, _, begin, end = block
        rounded = _probabilities(_scores(_rows(q, block), wide_k, block, form), block, form).to(q.dtype)
        mixed[units, :, begin:end] = torch.bmm(rounded, v[units, block.keys]).view(mixed[units, :, begin:end].shape)
    return mixed


def attention_grads(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, form: ScoreForm = PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v for that of the result."""
    by_unit = grad.unflatten(2, q.shape[1:3]).permute(0, 2, 3, 1, 4).flatten(0, 1)
    q_grad, k_grad, v_grad = _grads_of_units(by_unit, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), form)
    return q_grad.view(q.shape), k_grad.view(k.shape), v_grad.view(v.shape)


def _grads_of_units(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, form: ScoreForm
) -> tuple[Tensor, Tensor, Tensor]:
    wide_k, wide_v, scale = _wide(k), _wide(v), q.shape[-1] ** -0.5
    q_grad = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_grad, v_grad = (torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (wide_k, wide_v))
    for block in _blocks(q, form.window):
        units, _, begin, end = block
        rows, rows_grad, keys = _rows(q, block), _rows(grad, block), block.keys
        scores = _scores(rows, wide_k, block, form)
        slope = None if form.cap is None else (scores / form.cap).square_().neg_().add_(1)
        probabilities = _probabilities(scores, block, form)
        v_grad[units, keys].add_(torch.bmm(probabilities.to(q.dtype).transpose(1, 2), rows_grad))
        scores_grad = torch.bmm(_wide(rows_grad), wide_v[units, keys].transpose(1, 2))
        scores_grad = torch._softmax_backward_data(scores_grad, probabilities, -1, scores_grad.dtype)
        scores_grad = (scores_grad if slope is None else scores_grad.mul_(slope)).to(q.dtype)
        q_grad[units, :, begin:end] = torch.bmm(scores_grad, k[units, keys]).view(q_grad[units, :, begin:end].shape)
        k_grad[units, keys].add_(torch.bmm(scores_grad.transpose(1, 2), rows))
    return q_grad.mul_(scale), k_grad.mul_(scale).to(k.dtype), v_grad.to(v.dtype)


def _scores(rows: Tensor, wide_k: Tensor, block: _Block, form: ScoreForm) -> Tensor:
    """Of rows (some units, group * queries, size) with the block's keys, at least in fp32; capped, not masked."""
    scores = torch.bmm(_wide(rows) * rows.shape[-1] ** -0.5, wide_k[block.units, block.keys].transpose(1, 2))
    return scores if form.cap is None else scores.div_(form.cap).tanh_().mul_(form.cap)


def _probabilities(scores: Tensor, block: _Block, form: ScoreForm) -> Tensor:
    """The softmax of scores, which get a mask."""
    _, first, begin, end = block
    hidden = scores.new_full((end - begin, end - begin), float("-inf"))
    by_query = scores.unflatten(1, (-1, end - begin))
    by_query[..., begin - first :].add_(hidden.triu(1))
    if form.window is not None and end - first > form.window:
        # query begin + i sees no key before begin + i - window + 1, the first of the block at most i columns
        too_early = torch.full_like(hidden, float("-inf")).tril_(begin - first - form.window)
        by_query[..., : end - begin].add_(too_early)
    return torch.softmax(scores, -1)


def _blocks(q: Tensor, window: int | None) -> Iterator[_Block]:
    """All blocks of q (units, group, seq, size), those of the same units one after the other."""
    num_units, group, length, _ = q.shape
    num_rows = 128 if q.dtype.itemsize == 2 else 64  # tried: 64, 128 and 256
    num_keys = length if window is None else min(length, window + num_rows)
    num_at_once = max(1, SCORES_AT_ONCE // (group * min(num_rows, length) * num_keys))
    for first in range(0, num_units, num_at_once):
        for begin in range(0, length, num_rows):
            first_key = 0 if window is None else max(0, begin - window + 1)
            yield _Block(slice(first, first + num_at_once), first_key, begin, min(begin + num_rows, length))


def _rows(x: Tensor, block: _Block) -> Tensor:
    """The block's rows of x (units, group, seq, size): (some units, group * rows, size)."""
    return x[block.units, :, block.begin : block.end].flatten(1, 2)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x
