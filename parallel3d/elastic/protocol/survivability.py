"""Whether a run can go on without the workers it has lost, and if not, what exactly is missing. Pure.

Two things must remain: a whole replica of every stage, and a live holder of every range of optimizer state. Holders
are those of the last committed shard map: a spare or a draining worker still holds its ranges until the change that
removes it is committed; a dead one holds nothing. An embedding that two stages share needs no extra check: a holder of
one of its ranges also holds one of its stage's (optim/shard_map.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from parallel3d.optim.shard_map import plan_stage
from parallel3d.parallel.grid import Grid


@dataclass(frozen=True, kw_only=True)
class Survivability:
    """A decision and its reason, for messages."""

    can_continue: bool
    reason: str


def check_survivability(
    grid: Grid,
    *,
    zero_stage: int,
    zero_backups: int,
    hosts: Mapping[int, str],
    dead: Collection[int],
    draining: Collection[int] = (),
    fresh: bool = False,
    next_grid: Grid | None = None,
) -> Survivability:
    """Decides whether training on `grid` can go on without the `dead`; `draining` ranks hand over their ranges.

    `hosts` are those that the shard map of `grid` was planned for. `fresh`: no rank holds any state yet. `next_grid` is
    what would be left of `grid`, its vacancies filled; by default nothing fills them.
    """
    gone = {*dead, *draining}
    missing = [
        f"stage {stage} has no replica left: lost {_lost_coordinates(grid, stage, gone)}"
        for stage in (next_grid or grid.without(gone)[0]).stages_lost()
    ]
    if not (missing or fresh):
        missing = list(_lost_ranges(grid, set(dead), zero_stage=zero_stage, zero_backups=zero_backups, hosts=hosts))
    if missing:
        return Survivability(can_continue=False, reason="; ".join(missing))
    return Survivability(can_continue=True, reason="every stage has a replica, every range of optimizer state a holder")


def list_words(words: Iterable[object]) -> str:
    """Returns "1", "1 and 2", "1, 2 and 3"."""
    *init, last = map(str, words)
    return f"{', '.join(init)} and {last}" if init else last


def _lost_coordinates(grid: Grid, stage: int, gone: Collection[int]) -> str:
    lost = (rank for replica in sorted(grid.stages[stage]) for rank in grid.tp_ranks((stage, replica)) if rank in gone)
    return list_words(f"{grid.coordinates(rank)} (rank {rank})" for rank in lost)


def _lost_ranges(
    grid: Grid, dead: set[int], *, zero_stage: int, zero_backups: int, hosts: Mapping[int, str]
) -> Iterator[str]:
    """The ranges without a live holder, which are among those of the dead: nothing else is looked at."""
    lost = [grid.coordinates(rank) for rank in dead if grid.holds(rank)]
    for stage in sorted({each.pp for each in lost}):
        positions = sorted({each.tp for each in lost if each.pp == stage})
        maps = plan_stage(grid, stage, positions, zero_stage=zero_stage, zero_backups=zero_backups, hosts=hosts)
        for tp, shard_map in zip(positions, maps):
            for number in shard_map.lost_ranges(dead):
                ranks = shard_map.holders[number]
                who = f"rank {ranks[0]}, its only holder," if len(ranks) == 1 else f"ranks {list_words(ranks)}"
                verb = "was" if len(ranks) == 1 else "were"
                why = " (elastic.zero_backups is 0)" if zero_backups == 0 else ""
                yield (
                    f"range {number} of the optimizer state of stage {stage}, tp {tp} has no holder left: "
                    f"{who} {verb} lost{why}"
                )
