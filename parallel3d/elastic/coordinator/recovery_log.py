"""The recovery log: cause and timeline of each change of membership, as a record and as a line of text. Pure.

    loss ....... evidence ....... record sent ....... all confirmed ....... training again ....... first step done
       detect_s         agree_s             repair_s               regroup_s            first_step_s

Guardians report the first time, the coordinator measures the next two, the new generation's leader reports the others.
A further loss before the commit belongs to the same change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel3d.elastic.protocol.membership import GenerationRecord, LogPosition
from parallel3d.parallel.grid import Grid

Json = dict[str, Any]


@dataclass(kw_only=True)
class _MembershipChange:
    began_s: float
    detect_s: float | None = None
    """The longest time from a last sign of life to the evidence; None if no worker was lost."""
    positions: dict[int, LogPosition] = field(default_factory=dict)
    """By rank, the position of its newest entry."""
    record: GenerationRecord | None = None
    agree_s: float = 0.0
    repair_s: float | None = None
    moved_bytes: dict[int, int] = field(default_factory=dict)
    regroup_s: float | None = None
    plan: str = ""
    first_step_s: float | None = None


STAY_AWAY = "lost workers are not started again, since elastic.max_rejoins is 0; with 3 each is, up to 3 times an hour"


class RecoveryLog:
    """Follows a run that began on `grid`; all times are of one clock. Some methods return records to emit.

    `returns`: lost workers are started again, or spares wait. If not, the first loss that leaves a place empty says
    how.
    """

    def __init__(self, grid: Grid, *, returns: bool = True):
        self._has_hint = not returns
        self._first_grid = grid
        self._coordinates = {rank: grid.coordinates(rank) for rank in grid.ranks}
        """The newest of every rank that has ever had some."""
        self._change: _MembershipChange | None = None
        """Under way, or committed but not yet published."""

    def begin(self, now_s: float, *, detect_s: Iterable[float] = ()) -> list[Json]:
        """Begins a change, or adds evidence to the one under way; returns what was left to emit of the one before."""
        before = self.close() if self._change and self._change.repair_s is not None else []
        change = self._change = self._change or _MembershipChange(began_s=now_s)
        change.detect_s = max((*detect_s, *([] if change.detect_s is None else [change.detect_s])), default=None)
        change.positions, change.moved_bytes = {}, {}
        return before

    def record_report(self, rank: int, position: LogPosition) -> None:
        if self._change:
            self._change.positions[rank] = position

    def add_record(self, record: GenerationRecord, now_s: float) -> None:
        if self._change:
            self._change.record, self._change.agree_s = record, now_s - self._change.began_s
        for grid in filter(None, (record.previous, record.grid)):
            self._coordinates |= {rank: grid.coordinates(rank) for rank in grid.ranks}

    def record_confirm(self, rank: int, moved_bytes: int) -> None:
        if self._change:
            self._change.moved_bytes[rank] = moved_bytes

    def record_commit(self, now_s: float) -> None:
        if change := self._change:
            change.repair_s = now_s - change.began_s - change.agree_s

    def record_resumed(self, generation: int, *, regroup_s: float, plan: str) -> list[Json]:
        """Records that the new generation trains; returns the line for the terminal, perhaps with a hint."""
        change = self._change
        if not change or not change.record or change.record.generation != generation or change.repair_s is None:
            return []
        change.regroup_s, change.plan = regroup_s, plan
        counts = self._counts(change.record)
        lines = [{"kind": "membership", "text": self._describe(change, change.record), **counts}]
        if self._has_hint and change.record.evicted and counts["lost"]:
            self._has_hint = False
            lines.append({"kind": "notice", "text": STAY_AWAY})
        return lines

    def record_step(self, step_s: float) -> list[Json]:
        """Records a completed step; a generation's first one completes the record of its change."""
        if not self._change or self._change.regroup_s is None:
            return []
        self._change.first_step_s = step_s
        return self.close()

    def close(self) -> list[Json]:
        """Returns the record of a committed change as far as known, once."""
        change, self._change = self._change, None
        if not change or not change.record or change.repair_s is None:
            return []
        record = change.record
        return [
            {
                "event": "membership",
                "generation": record.generation,
                "step": record.position.iteration + 1,
                "who": [self._identify(rank) for rank in _removed_ranks(record)],
                "joined": [self._identify(rank) for rank in record.joiners],
                "why": record.reason,
                "detect_s": change.detect_s,
                "agree_s": change.agree_s,
                "repair_s": change.repair_s,
                "regroup_s": change.regroup_s,
                "first_step_s": change.first_step_s,
                "moved_bytes": sum(change.moved_bytes.values()),
                "forward_or_back": "forward" if _some_lacked_an_entry(change.positions, record) else "back",
                "widths_before": _widths(record.previous or record.grid),
                **self._counts(record),
                "plan": change.plan,
            }
        ]

    def _describe(self, change: _MembershipChange, record: GenerationRecord) -> str:
        lost = [f"lost {self._name(lost_worker.rank)}: {lost_worker.why}" for lost_worker in record.evicted]
        left = [f"{self._name(rank)} has left" for rank in record.draining]
        joined = [f"{self._name(rank)} joins" for rank in record.joiners]
        counts = self._counts(record)
        parts = {
            "noticed": change.detect_s or 0.0,
            "agreed": change.agree_s,
            "repaired": change.repair_s or 0.0,
            "regrouped": change.regroup_s or 0.0,
        }
        return "; ".join(
            [
                f"generation {record.generation}: {'; '.join(lost + left + joined) or record.reason}",
                f"{counts['live']} live, {counts['spare']} spare, {counts['lost']} lost",
                f"back in {_rounded(sum(parts.values()))} s "
                f"({', '.join(f'{name} {_rounded(seconds)}' for name, seconds in parts.items())}), "
                f"{sum(change.moved_bytes.values()) / 2**20:.1f} MiB moved",
                *([change.plan] if change.plan else []),
            ]
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._coordinates[rank]})" if rank in self._coordinates else f"rank {rank}"

    def _identify(self, rank: int) -> Json:
        return {"rank": rank, "coordinates": str(self._coordinates.get(rank, ""))}

    def _counts(self, record: GenerationRecord) -> Json:
        """live: in the grid; places: of the first grid; lost: of these, those that are empty and for which there is no
        spare; widths: each stage's replicas."""
        first, widths = self._first_grid, _widths(record.grid)
        num_empty = first.tp_size * sum(max(0, want - have) for want, have in zip(_widths(first), widths))
        spare = len(record.spares)
        counts = {"live": len(record.grid.ranks), "spare": spare, "lost": max(0, num_empty - spare)}
        return {**counts, "places": len(first.ranks), "widths": widths}


def _widths(grid: Grid) -> list[int]:
    return [len(stage) for stage in grid.stages]


def _removed_ranks(record: GenerationRecord) -> list[int]:
    return sorted({lost_worker.rank for lost_worker in record.evicted} | set(record.draining))


def _rounded(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.3f}"


def _some_lacked_an_entry(positions: Mapping[int, LogPosition], record: GenerationRecord) -> bool:
    """True if a member that took part in the last iteration had to take that entry from the record."""
    took_part = (record.previous or record.grid).ranks
    return any(positions[rank] < record.position for rank in took_part if rank in positions)
