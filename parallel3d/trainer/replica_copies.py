"""The replica check in a run: which state a rank shares with others, and what happens when copies differ.

It covers the state before the iteration's update: the weights of all replicas, the weights that all tensor-parallel
ranks share, moments and master weights of a range's owner and its backups. The checksums travel in the iteration's
all-reduce (debug/replica_check.py). Only when they show a difference do the ranks exchange digests to name it, before
the iteration changes anything. A check interrupted by a loss is repeated with its iteration.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from parallel3d.debug.digest import digest
from parallel3d.debug.replica_check import ReplicaCopy, checksums_of, describe_difference, find_differences
from parallel3d.errors import ReplicasDiffer
from parallel3d.optim.bucket import Bucket
from parallel3d.trainer.context import RankContext

MAX_NAMED = 10


def is_check_due(rank: RankContext, iteration: int) -> bool:
    """Whether this iteration checks the copies; the same on every rank."""
    every = rank.config.debug.replica_check_every
    return every is not None and iteration % every == 0


def replica_checksums(rank: RankContext, iteration: int) -> dict[int, list[int]]:
    """This rank's checksums, by stage; tied embeddings count for the first of the two stages that hold them."""
    held: defaultdict[int, list[ReplicaCopy]] = defaultdict(list)
    rank.optimizer.finish_gather()
    for bucket in rank.optimizer.buckets:
        held[rank.grid.embedding_stages[0] if bucket.plan.key.tied else rank.coordinates.pp] += copies_of(rank, bucket)
    return {stage: checksums_of(mine, rank=rank.rank, iteration=iteration) for stage, mine in held.items()}


def report_differences(rank: RankContext, iteration: int) -> str:
    """Names the copies that differ, after the checksums showed that some do. All ranks call it and get the same text.

    Raises ReplicasDiffer if `debug.replica_check_action` is "stop".
    """
    held = [copy for bucket in rank.optimizer.buckets for copy in copies_of(rank, bucket)]
    tables = all_gather_tables(rank, {copy.name: copy.digest for copy in held})
    coordinates = {other: str(rank.grid.coordinates(other)) for other in rank.grid.ranks}
    lines = [describe_difference(found, coordinates) for found in find_differences(tables)]
    more = [f"... and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else []
    head = f"copies that must be the same bits differ before the update of step {iteration}:"
    text = "\n  ".join([head, *lines[:MAX_NAMED], *more])
    if rank.config.debug.replica_check_action == "stop":
        raise ReplicasDiffer(text)
    return text


@dataclass(frozen=True, kw_only=True)
class SharedRange:
    """Elements of a bucket that other ranks hold too: the other replicas, or `neighbours` in this replica."""

    parameter: str
    where: str
    """Distinguishes it from the range of the same name on other tensor-parallel ranks."""
    offset: int
    """Start of the parameter in the bucket."""
    span: range
    neighbours: tuple[int, ...] = ()

    def named(self, what: str, span: range) -> str:
        return f"{what} of {self.parameter}[{span.start - self.offset}:{span.stop - self.offset}]{self.where}"


def copies_of(rank: RankContext, bucket: Bucket) -> Iterator[ReplicaCopy]:
    """This rank's copies of all state in a bucket that other ranks hold too, by parameter."""
    grid, coordinates = rank.grid, rank.coordinates
    replicas = (
        grid.embedding_ranks(coordinates.tp, rank.chunk_layout.embedding_stages)
        if bucket.plan.key.tied
        else grid.dp_ranks(coordinates.pp, coordinates.tp)
    )
    for shared_range in _shared_ranges(rank, bucket):
        span, holders = shared_range.span, shared_range.neighbours or replicas
        value = digest([bucket.weights[span.start : span.stop]])
        yield ReplicaCopy(name=shared_range.named("weights", span), holders=holders, digest=value)
        yield from _state(rank, bucket, shared_range)


def _state(rank: RankContext, bucket: Bucket, shared_range: SharedRange) -> Iterator[ReplicaCopy]:
    """Copies of optimizer state: owner and backups of a range, or the owners among neighbours."""
    shard_map = rank.optimizer.shard_map_of(bucket)
    for shard, number in zip(bucket.shards, shard_map.ranges_of(rank.rank)):
        span = range(max(shared_range.span.start, shard.span.start), min(shared_range.span.stop, shard.span.stop))
        holders = shard_map.holders[number]
        if not span or (shared_range.neighbours and holders[0] != rank.rank):
            continue
        rows = shard.read(span.start, span.stop, with_master=bucket.has_master)
        titles = (*(state.title for state in bucket.rule.states), "master weights")
        for what, row in zip(titles, rows):
            yield ReplicaCopy(
                name=shared_range.named(what, span), holders=shared_range.neighbours or holders, digest=digest([row])
            )


def _shared_ranges(rank: RankContext, bucket: Bucket) -> Iterator[SharedRange]:
    """Each parameter, shared by the replicas, and the parts of it shared by tensor-parallel ranks."""
    key, tp_ranks, at = bucket.plan.key, rank.grid.tp_ranks(rank.coordinates.replica), rank.coordinates.tp
    first = at // key.copies * key.copies
    for param_slot in bucket.plan.param_slots:
        where = "" if key.tp_replicated or len(tp_ranks) == 1 else f" at tp{at}"
        whole = SharedRange(
            parameter=param_slot.name,
            where=where,
            offset=param_slot.offset,
            span=range(param_slot.offset, param_slot.offset + param_slot.length),
        )
        yield whole
        if key.tp_replicated:
            yield replace(whole, neighbours=tp_ranks)
        for part in param_slot.shared:
            neighbours = tp_ranks[first : first + key.copies]
            yield replace(whole, where=f" at tp{first} to tp{first + key.copies - 1}", span=part, neighbours=neighbours)


def all_gather_tables(rank: RankContext, table: dict[str, int]) -> dict[int, dict[str, int]]:
    """Tables of all ranks, by rank: an all-gather over the grid of their JSON, padded to the longest."""
    world = rank.groups.world
    text = torch.frombuffer(bytearray(json.dumps(table).encode()), dtype=torch.uint8)
    longest = int(world.all_reduce_max(torch.tensor([len(text)], dtype=torch.int64)).item())
    mine = torch.full((longest,), ord(" "), dtype=torch.uint8)
    mine[: len(text)] = text
    gathered = mine.new_empty(longest * world.size)
    world.all_gather(gathered, mine)
    return {
        other: json.loads(bytes(part.tolist())) for other, part in zip(world.ranks, gathered.view(world.size, longest))
    }
