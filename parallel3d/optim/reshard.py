"""Moves a bucket's optimizer state from one shard map to another, directly from a live holder to each new one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product

import torch
from torch import Tensor

from parallel3d.optim.bucket import Bucket
from parallel3d.optim.bucket_plan import equal_range
from parallel3d.optim.shard_map import Move, ShardMap, ShardMaps, plan_moves
from parallel3d.optim.state_shard import Shard
from parallel3d.parallel.p2p_messages import Header, Kind, Links


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """A change from the shard maps of one grid to those of another, in membership generation `generation`."""

    generation: int
    old: ShardMaps | None
    """None at the start of a run: ranges are initialised, and nothing moves."""
    new: ShardMaps
    live: Collection[int]
    """Ranks that can still send what they hold."""
    weights_gathered: bool = False
    """Whether every rank of the new maps has all weights already, so that they need not travel."""


def move_bucket(
    bucket: Bucket, number: int, change: ReshardPlan, *, rank: int, version: int, links: Links
) -> tuple[list[Shard], int]:
    """Returns this rank's shards by the new map, and the bytes that it has received for them.

    `number` names the bucket in messages. Shards whose range stays the same are kept, if this rank holds it by the old
    map: what a rank has from before that map is out of date.
    """
    # Every rank makes the same plan of moves from the two maps, and carries out those in which it is source or target.
    # First it sends all that others need; sends don't wait for their receiver (bounded=False), so no ring of ranks can
    # form that wait for each other. Then it fills its new shards: with what its old ones hold, by copying, and with the
    # rest as it arrives. The old states stay as they are until `commit`, so a death in between costs only the new ones.
    assert change.old is not None, "nothing moves at the start of a run"
    old, new = (maps.of(bucket.plan.key) for maps in (change.old, change.new))
    moves = _plan(bucket, old, new, frozenset(change.live))
    with_master = bucket.has_master or not change.weights_gathered

    def header(num_elements: int) -> Header:
        return Header(
            generation=change.generation,
            iteration=version,
            kind=Kind.STATE,
            micro_batch=number,
            shape=(bucket.num_rows(with_master=with_master), num_elements),
            dtype=bucket.state_dtype,
        )

    for move in moves:
        if move.source == rank and move.target != rank:
            values = read_shards(bucket.shards, move.start, move.stop, with_master=with_master)
            links.send(move.target, header(move.stop - move.start), values, bounded=False)
    held = {(span.start, span.stop) for span in _ranges(bucket, old, rank)}
    by_span = {(shard.span.start, shard.span.stop): shard for shard in bucket.shards}
    kept = {span: shard for span, shard in by_span.items() if span in held}
    spans = _ranges(bucket, new, rank)
    shards = [kept.get((span.start, span.stop)) or bucket.empty_shard(span) for span in spans]
    made = [shard for shard in shards if (shard.span.start, shard.span.stop) not in kept]
    num_bytes = 0
    for move in moves:
        if move.target == rank == move.source:
            for shard, old_shard in product(made, bucket.shards):
                shard.copy_from(old_shard, move.start, move.stop)
        elif move.target == rank:
            values = links.receive(move.source, header(move.stop - move.start))
            num_bytes += values.nbytes
            write_shards(made, move.start, values)
    return shards, num_bytes


def _plan(bucket: Bucket, old: ShardMap, new: ShardMap, live: frozenset[int]) -> Sequence[Move]:
    if not bucket.plan.key.is_matrix_wise:
        return plan_equal_ranges(old, new, live, bucket.plan.num_elements)
    return _plan_moves(old, new, live, bucket.plan.num_elements, bucket.plan.range_of)


@lru_cache(maxsize=64)
def plan_equal_ranges(old: ShardMap, new: ShardMap, live: frozenset[int], num_elements: int) -> Sequence[Move]:
    """The moves of a bucket of equal ranges; most buckets of a model have the same length, and so the same moves."""
    return _plan_moves(old, new, live, num_elements, partial(equal_range, num_elements))


def _plan_moves(
    old: ShardMap, new: ShardMap, live: frozenset[int], num_elements: int, range_of: Callable[[int, int], range]
) -> Sequence[Move]:
    def ranges(shard_map: ShardMap, rank: int) -> list[range]:
        return [range_of(number, shard_map.num_ranges) for number in shard_map.ranges_of(rank)]

    held = {rank: ranges(old, rank) for ranks in old.holders for rank in ranks if rank in live}
    wanted = {rank: ranges(new, rank) for ranks in new.holders for rank in ranks}
    return plan_moves(held, wanted, num_elements)


def _ranges(bucket: Bucket, shard_map: ShardMap, rank: int) -> list[range]:
    return [bucket.plan.range_of(number, shard_map.num_ranges) for number in shard_map.ranges_of(rank)]


def read_shards(shards: Sequence[Shard], start: int, stop: int, *, with_master: bool) -> Tensor:
    """Reads elements start..stop, (rows, stop - start), from the shards that hold them: one, or two neighbours."""
    parts = [
        shard.read(max(start, shard.span.start), min(stop, shard.span.stop), with_master=with_master)
        for shard in sorted(shards, key=lambda shard: shard.span.start)
        if shard.span.start < stop and start < shard.span.stop
    ]
    values = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    assert values.shape[1] == stop - start, f"elements {start} to {stop} are not all held here"
    return values


def write_shards(shards: Sequence[Shard], start: int, values: Tensor) -> None:
    """Writes `values` (rows, n) into every shard that holds some of the elements from `start` on."""
    stop = start + values.shape[1]
    for shard in shards:
        first, last = max(start, shard.span.start), min(stop, shard.span.stop)
        if first < last:
            shard.write(first, values[:, first - start : last - start])
