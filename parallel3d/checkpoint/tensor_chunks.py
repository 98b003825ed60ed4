"""Maps ranges of flat buckets to rectangles of the model's tensors, and decides which rank writes which. Pure.

A checkpoint knows no ranks, no fused parameters and no padding. It holds *tensors* (parts of fused parameters under
names of their own) as rectangles. A range of a bucket, wherever ZeRO cuts it, becomes rectangles::

    attention.qkv.weight on rank 1 of 2          a range of its flat elements        rectangles
    | q: rows 4..7 | k: rows 2, 3 | v: 2, 3 |    row 1, column 3 to row 5, column 2  q[5:6, 3:8]  q[6:8, :]
                                                                                     k[2:3, :]    k[3:4, 0:2]

Saving, loading and resharding all use this one function. Elements that several ranks hold (copies over the
tensor-parallel ranks, replicas, backups) are written by one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from parallel3d.optim.bucket_plan import BucketPlan, ParamSlot
from parallel3d.optim.shard_map import ShardMap
from parallel3d.parallel.sharding import IndexRun, ParamSharding, TpShard

IntTuple = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorChunk:
    """A rectangle of a tensor, and the position of its elements in the bucket."""

    tensor: str
    start: IntTuple
    shape: IntTuple
    offset: int
    """Position of the rectangle's first element in the bucket."""
    strides: IntTuple
    """Elements of the bucket from one index to the next, by dimension."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def tensors_of(sharding: ParamSharding) -> dict[str, IntTuple]:
    """Names and shapes of the tensors as which a parameter is stored: itself, or its fused blocks."""
    if not sharding.fused_blocks or sharding.dim is None:
        return {sharding.name: sharding.shape}
    dim, shape = sharding.dim, sharding.shape
    return {
        fused_block_name(sharding.name, chunk.name): _with(shape, dim, chunk.size) for chunk in sharding.fused_blocks
    }


def stored_rows(sharding: ParamSharding, rows: range) -> Iterator[tuple[str, range, int]]:
    """Yields where rows of a parameter are stored: (tensor, its rows, offset of the first within `rows`)."""
    assert not sharding.fused_blocks or sharding.dim == 0, f"{sharding.name} has no chunks of rows"
    offset = 0
    for name, shape in tensors_of(sharding).items():
        first, last = max(rows.start, offset), min(rows.stop, offset + shape[0])
        if first < last:
            yield name, range(first - offset, last - offset), first - rows.start
        offset += shape[0]


def fused_block_name(parameter: str, chunk: str) -> str:
    """layers.0.attention.qkv.weight, q -> layers.0.attention.q.weight"""
    module, _, kind = parameter.rpartition(".")
    path = module.rpartition(".")[0]
    return ".".join(part for part in (path, chunk, kind) if part)


def tensor_chunks_of(
    sharding: ParamSharding, param_slot: ParamSlot, span: range, *, tp: TpShard, with_copies: bool
) -> Iterator[TensorChunk]:
    """The rectangles of a parameter within `span`, a range of the bucket's elements.

    Without copies, elements that neighbouring tensor-parallel ranks share are left out on all but the first of them.
    """
    shape = sharding.local_shape(tp.size)
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    dim = sharding.dim or 0
    start, stop = max(span.start - param_slot.offset, 0), min(span.stop - param_slot.offset, param_slot.length)
    for box_start, box_shape in boxes(start, stop, shape) if start < stop else ():
        for run in sharding.runs(tp):
            first = max(box_start[dim], run.local_start)
            last = min(box_start[dim] + box_shape[dim], run.local_start + run.length)
            if first >= last or (tp.rank % run.copies and not with_copies):
                continue
            name, chunk_start = _fused_block_at(sharding, run)
            local = _with(box_start, dim, first)
            yield TensorChunk(
                tensor=name,
                start=_with(box_start, dim, first - run.local_start + run.global_start - chunk_start),
                shape=_with(box_shape, dim, last - first),
                offset=param_slot.offset + sum(index * stride for index, stride in zip(local, strides)),
                strides=strides,
            )


def boxes(start: int, stop: int, shape: IntTuple) -> Iterator[tuple[IntTuple, IntTuple]]:
    """Yields elements start..stop of a flattened tensor as (start, shape) of rectangles: at most 2 dims - 1."""
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # within one row
        yield from _in_row(start // inner, start, stop, shape)
        return
    if start < first * inner:
        yield from _in_row(first - 1, start, first * inner, shape)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if last * inner < stop:
        yield from _in_row(last, last * inner, stop, shape)


def row_blocks(shape: IntTuple, max_elements: int) -> Iterator[tuple[IntTuple, IntTuple]]:
    """Yields a tensor as (start, shape) of blocks of whole rows; a block exceeds `max_elements` only if a row does."""
    num_rows = max(1, max_elements // prod(shape[1:]))
    for row in range(0, shape[0], num_rows):
        yield _with((0,) * len(shape), 0, row), _with(shape, 0, min(num_rows, shape[0] - row))


def written_span(plan: BucketPlan, shard_map: ShardMap, rank: int) -> range:
    """The elements that `rank` writes: the range that it owns, or an equal share if there is a single range."""
    if shard_map.num_ranges == 1:
        holders = shard_map.holders[0]
        span = plan.range_of(holders.index(rank), len(holders))
    else:
        span = plan.range_of(shard_map.ranges_of(rank)[0], shard_map.num_ranges)
    return range(min(span.start, plan.num_elements), min(span.stop, plan.num_elements))


def overlap(
    start: IntTuple, shape: IntTuple, other_start: IntTuple, other_shape: IntTuple
) -> tuple[IntTuple, IntTuple] | None:
    """Start and shape of the intersection of two rectangles; None if it is empty."""
    first = tuple(max(a, b) for a, b in zip(start, other_start))
    last = tuple(min(a + n, b + m) for a, n, b, m in zip(start, shape, other_start, other_shape))
    size = tuple(b - a for a, b in zip(first, last))
    return (first, size) if all(length > 0 for length in size) else None


def _in_row(row: int, start: int, stop: int, shape: IntTuple) -> Iterator[tuple[IntTuple, IntTuple]]:
    base = row * prod(shape[1:])
    for inner_start, inner_shape in boxes(start - base, stop - base, shape[1:]):
        yield (row, *inner_start), (1, *inner_shape)


def _fused_block_at(sharding: ParamSharding, run: IndexRun) -> tuple[str, int]:
    """The tensor of a run of indices, and where that tensor begins in the whole parameter."""
    offset = 0
    for chunk in sharding.fused_blocks:
        if offset <= run.global_start < offset + chunk.size:
            return fused_block_name(sharding.name, chunk.name), offset
        offset += chunk.size
    return sharding.name, 0


def _with(numbers: IntTuple, dim: int, value: int) -> IntTuple:
    return (*numbers[:dim], value, *numbers[dim + 1 :])
