"""Which ranks hold which range of optimizer state, and how ranges travel when that changes. Pure.

A shard map belongs to one stage and tensor-parallel rank. It divides each bucket into `num_ranges` ranges, each with
its holders: the owner first, then its backup on another replica of the stage (the owners are those of Rajbhandari et
al. 2020; the backups are ours)::

    replicas 0 1 2 3, one backup     range 0: owner 0, backup 1     range 2: owner 2, backup 3
                                     range 1: owner 1, backup 2     range 3: owner 3, backup 0

With zero_stage 0 there is one range, which every replica holds.

A tied embedding is held by the replicas of two stages, the first and the last, and sharded over all of them: its shard
map is that of the first stage followed by that of the last. Each holder of one of its ranges then also holds a range of
its stage. So no loss takes a range of the embedding without a range of a stage, or the stage itself: tying makes no
loss fatal::

    first stage 0 1 2, last stage 7 8       range 0: owner 0, backup 1     range 3: owner 7, backup 8
                                            range 1: owner 1, backup 2     range 4: owner 8, backup 7
                                            range 2: owner 2, backup 0
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parallel3d.optim.bucket_plan import BucketKey
from parallel3d.parallel.grid import Grid


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """`holders[i]` are the global ranks that hold range i, the owner first."""

    holders: tuple[tuple[int, ...], ...]

    @property
    def num_ranges(self) -> int:
        return len(self.holders)

    def ranges_of(self, rank: int) -> tuple[int, ...]:
        """The ranges that a rank holds, its own first."""
        return self._by_rank.get(rank, ())

    @cached_property
    def _by_rank(self) -> dict[int, tuple[int, ...]]:
        """The ranges of each holder, its own first."""
        places: dict[int, list[tuple[int, int]]] = {}
        for number, ranks in enumerate(self.holders):
            for place, rank in enumerate(ranks):
                places.setdefault(rank, []).append((place, number))
        return {rank: tuple(number for _, number in sorted(mine)) for rank, mine in places.items()}

    def backup_of(self, rank: int) -> int | None:
        """The rank to which `rank` sends the reduced gradients of its own range; None without backups.

        With a single range each holder reduces the gradients itself.
        """
        if self.num_ranges == 1:
            return None
        mine = [self.holders[number] for number in self.ranges_of(rank)]
        return next((ranks[1] for ranks in mine if ranks[0] == rank and len(ranks) > 1), None)

    def lost_ranges(self, dead: Collection[int]) -> tuple[int, ...]:
        """Ranges whose holders are all dead."""
        return tuple(number for number, ranks in enumerate(self.holders) if all(rank in dead for rank in ranks))


@dataclass(frozen=True, kw_only=True)
class ShardMaps:
    """The shard maps of one stage and tensor-parallel rank, by the ranks that hold a bucket's parameters."""

    stage: ShardMap
    """For parameters of the stage."""
    embedding: ShardMap
    """For the tied embedding, which the first and the last stage hold."""

    def of(self, key: BucketKey) -> ShardMap:
        return self.embedding if key.tied else self.stage


@dataclass(frozen=True, kw_only=True)
class Move:
    """Elements start..stop of a bucket go from rank `source` to rank `target`; if they are the same, a local copy."""

    source: int
    target: int
    start: int
    stop: int


def plan_shard_map(
    grid: Grid, stage: int, tp: int, *, zero_stage: int, zero_backups: int, hosts: Mapping[int, str]
) -> ShardMap:
    """The shard map of one stage and tensor-parallel rank; backups are on other hosts than owners where possible.

    `zero_backups` is 0 or 1; a stage with one replica has none in either case.
    """
    return plan_stage(grid, stage, (tp,), zero_stage=zero_stage, zero_backups=zero_backups, hosts=hosts)[0]


def plan_stage(
    grid: Grid, stage: int, positions: Iterable[int], *, zero_stage: int, zero_backups: int, hosts: Mapping[int, str]
) -> list[ShardMap]:
    """The shard maps of some tensor-parallel ranks of a stage, as `plan_shard_map`'s."""
    rows = [grid.dp_ranks(stage, tp) for tp in positions]
    if zero_stage == 0:
        return [ShardMap(holders=(ranks,)) for ranks in rows]
    if zero_backups == 0 or len(grid.stages[stage]) == 1:
        return [ShardMap(holders=tuple((rank,) for rank in ranks)) for ranks in rows]
    shift = _backup_shift([grid.dp_ranks(stage, tp) for tp in range(grid.tp_size)], hosts)
    return [ShardMap(holders=tuple(zip(ranks, _rotate(ranks, shift)))) for ranks in rows]


def plan_shard_maps(
    grid: Grid,
    stage: int,
    tp: int,
    *,
    zero_stage: int,
    zero_backups: int,
    hosts: Mapping[int, str],
    embedding_stages: Sequence[int] = (),
) -> ShardMaps:
    """The shard maps of one stage and tensor-parallel rank. The owners of a tied embedding are in the order of
    `grid.embedding_ranks`."""

    def shard_map(stage: int) -> ShardMap:
        return plan_shard_map(grid, stage, tp, zero_stage=zero_stage, zero_backups=zero_backups, hosts=hosts)

    ends = tuple(embedding_stages) or grid.embedding_stages
    if zero_stage == 0:
        embedding = ShardMap(holders=(grid.embedding_ranks(tp, ends),))
    else:
        embedding = ShardMap(holders=tuple(ranks for end in ends for ranks in shard_map(end).holders))
    return ShardMaps(stage=shard_map(stage), embedding=embedding)


def plan_moves(
    held: Mapping[int, Sequence[range]], wanted: Mapping[int, Sequence[range]], num_elements: int
) -> tuple[Move, ...]:
    """Plans the moves after which every rank of `wanted` holds its ranges, from the ranges that live ranks hold.

    Elements from `num_elements` on are padding and stay. A rank that has an element keeps it (a move to itself); the
    others get it from the holder that has sent least so far. Raises AssertionError for an element without a holder.
    """
    # All borders of old and new ranges cut the bucket into intervals, within each of which the set of holders and the
    # set of targets are constant: the plan is made interval by interval. Every rank computes it from the same maps and
    # gets the same list, so senders and receivers agree without a message. `sent` balances the sources; its ties go to
    # the lowest rank, for the same reason. Intervals that travel together are joined to one message at the end.
    ranges = [r for table in (held, wanted) for mine in table.values() for r in mine]
    edges = sorted({num_elements, *(edge for r in ranges for edge in (r.start, r.stop) if edge < num_elements)})
    sources, targets = _ranks_by_start(held, edges), _ranks_by_start(wanted, edges)
    sent = dict.fromkeys(held, 0)
    moves: list[Move] = []
    for start, stop in zip(edges, edges[1:]):
        for target in targets[start]:
            assert sources[start], f"no live rank holds elements {start} to {stop}"
            here = target in sources[start]
            source = target if here else min(sources[start], key=lambda rank: (sent[rank], rank))
            sent[source] += 0 if here else stop - start
            moves.append(Move(source=source, target=target, start=start, stop=stop))
    return tuple(_join(moves))


def _ranks_by_start(table: Mapping[int, Sequence[range]], edges: Sequence[int]) -> dict[int, list[int]]:
    """For each interval between two edges, by its start: the ranks whose ranges cover it, ascending."""
    ranks: dict[int, list[int]] = {edge: [] for edge in edges}
    for rank in sorted(table):
        for mine in table[rank]:
            for edge in edges[bisect_left(edges, mine.start) : bisect_left(edges, mine.stop)]:
                ranks[edge].append(rank)
    return ranks


def _backup_shift(positions: Sequence[Sequence[int]], hosts: Mapping[int, str]) -> int:
    """The number of replicas from an owner to its backup: the smallest one with the most pairs on two hosts.

    `positions` are the ranks of each tensor-parallel rank's replicas. One shift serves all of them, so that the
    ranks of a replica hold the same ranges: a matrix-wise update rule joins these to whole matrices.
    """

    numbers: dict[str | None, int] = {}
    table = np.array([[numbers.setdefault(hosts.get(rank), len(numbers)) for rank in ranks] for ranks in positions])
    most = sum(_most_pairs(row) for row in table)
    best, best_pairs = 1, -1
    for shift in range(1, table.shape[1]):
        if best_pairs == most:
            break
        pairs = int((table[:, shift:] != table[:, :-shift]).sum() + (table[:, :shift] != table[:, -shift:]).sum())
        if pairs > best_pairs:
            best, best_pairs = shift, pairs
    return best


def _most_pairs(hosts: np.ndarray) -> int:
    """A bound of the replicas, by their hosts' numbers (replicas,), whose backup is on another host."""
    largest = int(np.bincount(hosts).max())
    return min(len(hosts), 2 * (len(hosts) - largest))


def _rotate(ranks: Sequence[int], shift: int) -> tuple[int, ...]:
    return (*ranks[shift:], *ranks[:shift])


def _join(moves: list[Move]) -> list[Move]:
    """Joins neighbouring moves between the same two ranks."""
    joined: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        row = joined.setdefault((move.source, move.target), [])
        if row and row[-1].stop == move.start:
            row[-1] = Move(source=move.source, target=move.target, start=row[-1].start, stop=move.stop)
        else:
            row.append(move)
    return sorted((move for row in joined.values() for move in row), key=lambda m: (m.start, m.target, m.source))
