"""Cuts a bucket's range into the pieces of the update's table. Sizes and offsets only."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from parallel3d.kernels.update_table import Piece
from parallel3d.optim.bucket_plan import ParamSlot
from parallel3d.parallel.sharding import ParamSharding, TpShard


def pieces_of(sharding: ParamSharding, slot: ParamSlot, span: range, tp: TpShard) -> list[Piece]:
    """The pieces of one parameter within `span` of its bucket, with the indices of `layers/global_index.py`.

    Padding may be left out: weights, states and gradients are 0 there, which updates and noise leave as they are.
    """
    dim, local = sharding.dim or 0, sharding.local_shape(tp.size)
    inner = prod(sharding.shape[dim + 1 :])
    width, stride = local[dim] * inner, sharding.shape[dim] * inner
    origin, num_rows = slot.offset - span.start, prod(local[:dim])
    pieces: list[Piece] = []
    for run in sharding.runs(tp):
        start, stop = origin + run.local_start * inner, origin + (run.local_start + run.length) * inner
        if num_rows > 1:
            assert run.local_start == 0 and not sharding.fused_blocks, f"{sharding.name}: blocks in later dimensions"
            stop = origin + slot.length
        piece = Piece(
            start=max(0, start),
            stop=min(len(span), stop),
            origin=origin,
            width=slot.length if width == stride else width,
            stride=stride,
            shift=(run.global_start - run.local_start) * inner,
            name=sharding.name,
            is_counted=tp.rank % run.copies == 0,
        )
        if piece.start >= piece.stop:
            continue
        if (
            pieces and replace(pieces[-1], start=piece.start, stop=piece.stop) == piece
        ):  # tp 1: blocks lie as in the whole
            pieces[-1] = replace(piece, start=pieces[-1].start)
        else:
            pieces.append(piece)
    return pieces
