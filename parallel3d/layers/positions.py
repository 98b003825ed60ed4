"""Learned positions: adds to each token the row of its index in its sequence (Radford et al., GPT-2).

Where attention keeps documents apart, the index is that in the document, as if each document were a sequence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from parallel3d.layers.micro_batch import MicroBatch, TokenSpan
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.sharding import ParamSharding


class _AddPositions(Function):
    """x + the positions' rows; backward adds to the main gradients of these rows, span by span."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ShardedParameter, token_spans: tuple[TokenSpan, ...]) -> Tensor:
        ctx.weight, ctx.token_spans = weight, token_spans
        result = x.clone()
        for token_span in token_spans:
            result[token_span.rows] += weight.detach()[token_span.positions.start : token_span.positions.stop]
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sink = ctx.weight.sink
        for token_span in ctx.token_spans:
            sink.buffer[token_span.positions.start : token_span.positions.stop] += grad[token_span.rows]
        sink.on_added()
        return grad, None, None


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
        num_local = x.shape[0]
        token_spans = tuple(micro_batch.document_spans(self.tp.first_local_token(num_local), num_local))
        return _AddPositions.apply(x, self.weight, token_spans)
