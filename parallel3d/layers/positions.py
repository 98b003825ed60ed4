"""Learned positions: adds to each token the row of its index in its sequence (Radford et al., GPT-2).

Where attention keeps documents apart, the index is that in the document, as if each document were a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from parallel3d.accelerator import is_accelerator
from parallel3d.layers.kv_cache import CachedTokens
from parallel3d.layers.micro_batch import MicroBatch, TokenSpan
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.sharding import ParamSharding


class _AddPositions(Function):
    """x + the positions' rows; backward adds to the main gradients of these rows, span by span."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ShardedParameter, token_spans: tuple[TokenSpan, ...]) -> Tensor:
        ctx.weight, ctx.token_spans = weight, token_spans
        if (common := common_positions(token_spans)) is not None:
            rows = weight.detach()[common.start : common.stop]
            return (x.view(len(token_spans), *rows.shape) + rows).view_as(x)
        result = x.clone()
        for token_span in token_spans:
            result[token_span.rows] += weight.detach()[token_span.positions.start : token_span.positions.stop]
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sink, common = ctx.weight.sink, common_positions(ctx.token_spans)
        if common is not None and is_accelerator(grad.device):
            add_sequences(sink.buffer[common.start : common.stop], grad)
        else:
            for token_span in ctx.token_spans:
                sink.buffer[token_span.positions.start : token_span.positions.stop] += grad[token_span.rows]
        sink.on_added()
        return grad, None, None


def common_positions(token_spans: Sequence[TokenSpan]) -> range | None:
    """The positions that all sequences have, where these are the same; None if they differ, as documents do."""
    first, *others = (token_span.positions for token_span in token_spans)
    return first if all(positions == first for positions in others) else None


def add_sequences(buffer: Tensor, grad: Tensor) -> None:
    """buffer (positions, hidden) += the sum over sequences of grad (sequences * positions, hidden), in one addition: a
    kernel for each sequence would be launched longer than it runs."""
    wide = torch.promote_types(torch.float32, grad.dtype)
    buffer += grad.view(-1, *buffer.shape).sum(0, dtype=wide)


class LearnedPositions(nn.Module):
    """(tokens_local, hidden) -> the same. Every tensor-parallel rank holds all (positions, hidden) rows."""

    def __init__(self, name: str, num_positions: int, hidden_size: int, *, init_std: float, context: LayerContext):
        super().__init__()
        self.tp = context.tp
        sharding = ParamSharding(
            name=name,
            shape=(num_positions, hidden_size),
            partial_grad=context.tp.is_token_sharded,
            init_std=init_std,
            is_token_table=True,
        )
        self.weight = context.parameter(sharding)

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        if isinstance(micro_batch, CachedTokens) and not micro_batch.begins:
            return x + self.weight.detach()[micro_batch.positions]
        num_local = x.shape[0]
        token_spans = tuple(micro_batch.document_spans(self.tp.first_local_token(num_local), num_local))
        return _AddPositions.apply(x, self.weight, token_spans)
