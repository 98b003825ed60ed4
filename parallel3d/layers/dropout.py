"""Dropout whose mask is a function of (seed, iteration, sequence slot, layer, site, index in the sequence).

It does not depend on the rank or the micro-batch that an element is in: a step that is repeated after a failure, or run
on another layout, drops the same elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.random_keys import keep_mask, key_of


class _Masked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return (x * keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), None, None


def dropout(
    x: Tensor, probability: float, *, micro_batch: MicroBatch, layer: int, site: str, tp: TensorParallel
) -> Tensor:
    """(tokens_local, hidden) -> the same, kept elements scaled by 1 / (1 - probability)."""
    if probability == 0.0 or not micro_batch.training:
        return x
    keep = _mask(x, probability, micro_batch, layer, site, tp)
    return _Masked.apply(x, keep, 1.0 / (1.0 - probability))


def _mask(x: Tensor, probability: float, micro_batch: MicroBatch, layer: int, site: str, tp: TensorParallel) -> Tensor:
    """The mask of this rank's tokens: row r of a sequence uses the counters r * hidden .. (r + 1) * hidden - 1."""
    num_local, hidden = x.shape
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    columns = torch.arange(hidden, device=x.device)
    for token_span in micro_batch.token_spans(tp.first_local_token(num_local), num_local):
        rows = torch.arange(token_span.positions.start, token_span.positions.stop, device=x.device)
        key = key_of("dropout", micro_batch.seed, micro_batch.iteration, token_span.slot, layer, site)
        keep[token_span.rows] = keep_mask(key, rows[:, None] * hidden + columns, probability)
    return keep
