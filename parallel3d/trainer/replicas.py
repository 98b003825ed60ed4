"""The replica check in a run: what a rank holds that others hold too, and what follows when copies differ.

It covers the state before the iteration's update, after the gather of the one before: weights of every replica, weights
that all tensor-parallel ranks hold, moments and master weights of a range's owner and its backup. The sums that decide
ride in the iteration's all-reduce (debug/replicas.py); only when they say that something differs do the ranks exchange
their digests, before the iteration changes anything, and name it. A check that a loss interrupts is made again with
its iteration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

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


def replica_words(rank: RankRuntime, iteration: int) -> list[int]:
    """This rank's part of the check, for the slots of its stage."""
    return check_words(copies(rank), rank=rank.rank, iteration=iteration)


def settle(rank: RankRuntime, iteration: int) -> str:
    """Names what differs, once the sums say that something does: all ranks call it, and get the same text.

    Raises ReplicasDiffer where `debug.replica_check_action` is "stop".
    """
    tables = exchange(rank, {copy.name: copy.digest for copy in copies(rank)})
    places = {other: str(rank.grid.coordinates(other)) for other in rank.grid.ranks}
    lines = [describe_difference(found, places) for found in find_differences(tables)]
    more = [f"... and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else []
    head = f"copies that must be the same bits differ before the update of step {iteration}:"
    text = "\n  ".join([head, *lines[:MAX_NAMED], *more])
    if rank.config.debug.replica_check_action == "stop":
        raise ReplicasDiffer(text)
    return text


def copies(rank: RankRuntime) -> Iterator[Copy]:
    """All that this rank holds and others too, parameter by parameter."""
    rank.optimizer.finish_gather()
    for bucket in rank.optimizer.buckets:
        yield from _weights(rank, bucket)
        yield from _state(rank, bucket)


def _weights(rank: RankRuntime, bucket: Bucket) -> Iterator[Copy]:
    grid, place = rank.grid, rank.place
    for parameter in bucket.parameters:
        name = _named("weights", parameter.sharding.name, rank, bucket)
        value = digest([parameter])
        yield Copy(name=name, holders=grid.dp_ranks(place.pp, place.tp), digest=value)
        if bucket.plan.key.tp_replicated:
            yield Copy(name=name, holders=grid.tp_ranks(place.replica), digest=value)


def _state(rank: RankRuntime, bucket: Bucket) -> Iterator[Copy]:
    """Of the ranges held: an owner's and its backups', and the owners' at all tensor-parallel positions."""
    cut = rank.optimizer.cut
    for shard, number in zip(bucket.shards, cut.ranges_of(rank.rank)):
        holders = cut.holders[number]
        for each in bucket.plan.places:
            start, stop = max(each.offset, shard.span.start), min(each.offset + each.length, shard.span.stop)
            if start >= stop:
                continue
            rows = shard.read(start, stop, with_master=bucket.has_master)
            piece = f"{each.name}[{start - each.offset}:{stop - each.offset}]"
            for what, row in zip(STATE_ROWS, rows):
                name = _named(what, piece, rank, bucket)
                value = digest([row])
                yield Copy(name=name, holders=holders, digest=value)
                if bucket.plan.key.tp_replicated and holders[0] == rank.rank:
                    yield Copy(name=name, holders=rank.grid.tp_ranks(rank.place.replica), digest=value)


def _named(what: str, parameter: str, rank: RankRuntime, bucket: Bucket) -> str:
    """The name that all holders use; parts of a cut parameter are told apart by their tensor-parallel position."""
    is_whole = bucket.plan.key.tp_replicated or rank.tp.group.size == 1
    return f"{what} of {parameter}" + ("" if is_whole else f" at tp{rank.place.tp}")


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
