"""Learned positions: each token gets the row of its index in its sequence added (Radford et al., GPT-2).

Where attention keeps documents apart, its index in its document: each is then trained on as if it stood alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from parallel3d.layers.micro_batch import MicroBatch, Piece
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import Placement
from parallel3d.sharding import ParamSharding


class _AddPositions(Function):
    """x + the positions' rows; backward adds, piece by piece, into those rows' main gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ShardedParameter, pieces: tuple[Piece, ...]) -> Tensor:
        ctx.weight, ctx.pieces = weight, pieces
        result = x.clone()
        for piece in pieces:
            result[piece.rows] += weight.detach()[piece.positions.start : piece.positions.stop]
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        buffer = ctx.weight.grad_buffer()
        for piece in ctx.pieces:
            buffer[piece.positions.start : piece.positions.stop] += grad[piece.rows]
        ctx.weight.grad_added()
        return grad, None, None


class LearnedPositions(nn.Module):
    """(tokens_local, hidden) -> the same. Every tensor-parallel rank holds all (positions, hidden) rows."""

    def __init__(self, name: str, num_positions: int, hidden_size: int, *, init_std: float, on: Placement):
        super().__init__()
        self.tp = on.tp
        sharding = ParamSharding(
            name=name, shape=(num_positions, hidden_size), partial_grad=on.tp.cuts_tokens, init_std=init_std
        )
        self.weight = on.parameter(sharding)

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        num_local = x.shape[0]
        pieces = tuple(micro_batch.document_pieces(self.tp.first_local_token(num_local), num_local))
        return _AddPositions.apply(x, self.weight, pieces)
