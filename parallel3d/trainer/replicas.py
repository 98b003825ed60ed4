"""The replica check in a run: what a rank holds that others hold too, and what follows when copies differ.

It covers the state before the iteration's update, after the gather of the one before: weights of every replica, weights
that all tensor-parallel ranks hold, moments and master weights of a range's owner and its backup. The sums that decide
ride in the iteration's all-reduce (debug/replicas.py); only when they say that something differs do the ranks exchange
their digests, before the iteration changes anything, and name it. A check that a loss interrupts is made again with
its iteration.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from parallel3d.debug.digest import digest
from parallel3d.debug.replicas import Copy, check_words, describe_difference, find_differences
from parallel3d.errors import ReplicasDiffer
from parallel3d.optim.bucket import Bucket
from parallel3d.trainer.build import RankRuntime

MAX_NAMED = 10
STATE_ROWS = ("first moment", "second moment", "master weights")


def is_due(rank: RankRuntime, iteration: int) -> bool:
    """Whether this iteration checks the copies: the same on every rank."""
    every = rank.config.debug.replica_check_every
    return every is not None and iteration % every == 0


def replica_words(rank: RankRuntime, iteration: int) -> dict[int, list[int]]:
    """This rank's part of the check, by stage; what the first stage shares with the last goes to its own slots."""
    held: defaultdict[int, list[Copy]] = defaultdict(list)
    rank.optimizer.finish_gather()
    for bucket in rank.optimizer.buckets:
        held[rank.grid.ends[0] if bucket.plan.key.tied else rank.place.pp] += copies_of(rank, bucket)
    return {stage: check_words(mine, rank=rank.rank, iteration=iteration) for stage, mine in held.items()}


def settle(rank: RankRuntime, iteration: int) -> str:
    """Names what differs, once the sums say that something does: all ranks call it, and get the same text.

    Raises ReplicasDiffer where `debug.replica_check_action` is "stop".
    """
    held = [copy for bucket in rank.optimizer.buckets for copy in copies_of(rank, bucket)]
    tables = exchange(rank, {copy.name: copy.digest for copy in held})
    places = {other: str(rank.grid.coordinates(other)) for other in rank.grid.ranks}
    lines = [describe_difference(found, places) for found in find_differences(tables)]
    more = [f"... and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else []
    head = f"copies that must be the same bits differ before the update of step {iteration}:"
    text = "\n  ".join([head, *lines[:MAX_NAMED], *more])
    if rank.config.debug.replica_check_action == "stop":
        raise ReplicasDiffer(text)
    return text


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Elements of a bucket that others hold, too: the other replicas, or `neighbours` within the own one."""

    parameter: str
    where: str
    """Sets apart what ranks at other tensor-parallel positions hold under the same name."""
    offset: int
    """Where the parameter begins in the bucket."""
    span: range
    neighbours: tuple[int, ...] = ()

    def named(self, what: str, span: range) -> str:
        return f"{what} of {self.parameter}[{span.start - self.offset}:{span.stop - self.offset}]{self.where}"


def copies_of(rank: RankRuntime, bucket: Bucket) -> Iterator[Copy]:
    """All of a bucket that this rank holds and others too, parameter by parameter."""
    grid, place = rank.grid, rank.place
    replicas = grid.end_ranks(place.tp) if bucket.plan.key.tied else grid.dp_ranks(place.pp, place.tp)
    for stretch in _stretches(rank, bucket):
        span, holders = stretch.span, stretch.neighbours or replicas
        value = digest([bucket.weights[span.start : span.stop]])
        yield Copy(name=stretch.named("weights", span), holders=holders, digest=value)
        yield from _state(rank, bucket, stretch)


def _state(rank: RankRuntime, bucket: Bucket, stretch: Stretch) -> Iterator[Copy]:
    """Of the ranges held: an owner's and its backups', or the owners' among neighbours."""
    cut = rank.optimizer.cut_of(bucket)
    for shard, number in zip(bucket.shards, cut.ranges_of(rank.rank)):
        span = range(max(stretch.span.start, shard.span.start), min(stretch.span.stop, shard.span.stop))
        holders = cut.holders[number]
        if not span or (stretch.neighbours and holders[0] != rank.rank):
            continue
        rows = shard.read(span.start, span.stop, with_master=bucket.has_master)
        for what, row in zip(STATE_ROWS, rows):
            yield Copy(name=stretch.named(what, span), holders=stretch.neighbours or holders, digest=digest([row]))


def _stretches(rank: RankRuntime, bucket: Bucket) -> Iterator[Stretch]:
    """Each parameter over the replicas, and what tensor-parallel ranks hold in common over those."""
    key, tp_ranks, at = bucket.plan.key, rank.grid.tp_ranks(rank.place.replica), rank.place.tp
    first = at // key.copies * key.copies
    for place in bucket.plan.places:
        where = "" if key.tp_replicated or len(tp_ranks) == 1 else f" at tp{at}"
        whole = Stretch(
            parameter=place.name,
            where=where,
            offset=place.offset,
            span=range(place.offset, place.offset + place.length),
        )
        yield whole
        if key.tp_replicated:
            yield replace(whole, neighbours=tp_ranks)
        for part in place.shared:
            neighbours = tp_ranks[first : first + key.copies]
            yield replace(whole, where=f" at tp{first} to tp{first + key.copies - 1}", span=part, neighbours=neighbours)


def exchange(rank: RankRuntime, table: dict[str, int]) -> dict[int, dict[str, int]]:
    """Every rank's table, by rank: an all-gather over all ranks of the grid, padded to the longest."""
    world = rank.groups.world
    text = torch.frombuffer(bytearray(json.dumps(table).encode()), dtype=torch.uint8)
    longest = int(world.all_reduce_max(torch.tensor([len(text)], dtype=torch.int64)).item())
    mine = torch.full((longest,), ord(" "), dtype=torch.uint8)
    mine[: len(text)] = text
    everybody = mine.new_empty(longest * world.size)
    world.all_gather(everybody, mine)
    return {
        other: json.loads(bytes(part.tolist())) for other, part in zip(world.ranks, everybody.view(world.size, longest))
    }
