"""A consistent copy of one rank's part of a checkpoint in host memory, so that training continues during the write.

It is taken between two steps, when all ranges that the rank owns are at the same version, and holds their weights
(master weights where there are any) and states. A save takes the memory of this copy, (1 + states) x the state's format
x parameters / replicas, and of one contiguous piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.checkpoint.index import WEIGHT
from parallel3d.checkpoint.tensor_chunks import IntTuple, TensorChunk, tensor_chunks_of, tensors_of, written_span
from parallel3d.optim.bucket import Bucket
from parallel3d.optim.distributed_optimizer import ShardedOptimizer
from parallel3d.parallel.sharding import TpShard


@dataclass(frozen=True, kw_only=True)
class BucketRange:
    """A range of a bucket: its rectangles, and a copy of its elements by kind, each (elements,)."""

    start: int
    pieces: tuple[TensorChunk, ...]
    states: dict[str, Tensor]
    """By kind: weights first, then the update rule's states."""

    def tensors(self) -> Iterator[tuple[str, TensorChunk, Tensor]]:
        """Yields (kind, piece, values) of all pieces; values have the piece's shape."""
        for kind, state in self.states.items():
            for tensor_chunk in self.pieces:
                yield (
                    kind,
                    tensor_chunk,
                    torch.as_strided(state, tensor_chunk.shape, tensor_chunk.strides, tensor_chunk.offset - self.start),
                )


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's part of a checkpoint."""

    ranges: tuple[BucketRange, ...]
    shapes: dict[str, IntTuple]
    """Shapes of the tensors of which it has pieces."""

    @property
    def num_bytes(self) -> int:
        return sum(state.nbytes for part in self.ranges for state in part.states.values())


@torch.no_grad()
def take_snapshot(optimizer: ShardedOptimizer, *, tp: TpShard) -> Snapshot:
    """Copies this rank's part; the next step may begin as soon as this returns."""
    ranges: list[BucketRange] = []
    shapes: dict[str, IntTuple] = {}
    for bucket in optimizer.buckets:
        span = written_span(bucket.plan, optimizer.shard_map_of(bucket), optimizer.rank)
        pieces = bucket_tensor_chunks(bucket, span, tp=tp, with_copies=False)
        if not pieces:
            continue
        shard = bucket.owned
        part = slice(span.start - shard.span.start, span.stop - shard.span.start)
        kinds = (WEIGHT, *bucket.rule.state_kinds())
        states = {kind: _copy(state[part]) for kind, state in zip(kinds, (shard.master, *shard.states))}
        ranges.append(BucketRange(start=span.start, pieces=pieces, states=states))
        named = {tensor_chunk.tensor for tensor_chunk in pieces}
        for parameter in bucket.parameters:
            shapes |= {name: shape for name, shape in tensors_of(parameter.sharding).items() if name in named}
    return Snapshot(ranges=tuple(ranges), shapes=shapes)


def bucket_tensor_chunks(bucket: Bucket, span: range, *, tp: TpShard, with_copies: bool) -> tuple[TensorChunk, ...]:
    """The rectangles of all parameters within a range of the bucket."""
    return tuple(
        tensor_chunk
        for parameter, param_slot in zip(bucket.parameters, bucket.plan.param_slots)
        for tensor_chunk in tensor_chunks_of(parameter.sharding, param_slot, span, tp=tp, with_copies=with_copies)
    )


def _copy(state: Tensor) -> Tensor:
    return state.detach().to("cpu", copy=True)
