"""The hang report: the status of every rank, and chains of waits followed to the rank that blocks them. Pure.

rank 0 (pp0 dp0 tp0) [step 7, receive gradient 3 <- (1, 0)] 31.2 s waits for rank 2
rank 1 (pp0 dp1 tp0) [step 7, all_reduce]                   31.0 s waits in generation0/world for rank 0 -> rank 2, ...
rank 2 (pp1 dp0 tp0) [step 7, forward 3]                    31.3 s blocks others
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_NAMED = 3
STATUS_TIMEOUT_S = 2.0
"""How long a report waits for ranks that do not answer."""


@dataclass(frozen=True, kw_only=True)
class HangReportLine:
    """One line of a hang report."""

    rank: int
    coordinates: str = ""
    doing: str = ""
    """The current instruction or phase."""
    for_s: float | None = None
    remark: str = ""
    """What the rank waits for, or another remark."""


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """A worker's answer to a status request; `doing` is "" if it has not answered."""

    rank: int
    coordinates: str = ""
    doing: str = ""
    for_s: float | None = None
    is_waiting: bool = False
    what: str = ""
    """The group whose collective it waits in; "" for a message. Without peers: what it waits for."""
    peers: tuple[int, ...] = ()
    """The ranks that it may be waiting for."""


class HangReport:
    """Collects the statuses of `ranks`; `why` is the report's heading. Times are of one clock, in seconds."""

    def __init__(self, why: str, ranks: Iterable[int], coordinates: Mapping[int, str], now_s: float):
        self._why = why
        self._statuses = {rank: WorkerStatus(rank=rank, coordinates=coordinates.get(rank, "")) for rank in ranks}
        self._unanswered = set(self._statuses)
        self._deadline_s = now_s + STATUS_TIMEOUT_S

    def add(self, rank: int, status: dict[str, Any]) -> None:
        """Adds a worker's answer, as `WorkerStatusTracker.report` gives it."""
        if rank in self._unanswered:
            self._unanswered.discard(rank)
            self._statuses[rank] = WorkerStatus(
                rank=rank,
                coordinates=self._statuses[rank].coordinates,
                doing=status["doing"],
                for_s=status["for_s"],
                is_waiting=status["is_waiting"],
                what=status["what"],
                peers=tuple(status["peers"]),
            )

    def is_over(self, now_s: float) -> bool:
        """True once all ranks have answered or the timeout has passed."""
        return not self._unanswered or now_s >= self._deadline_s

    def blocking_ranks(self) -> frozenset[int]:
        """Returns the ranks that keep others or themselves: those that do not wait for a rank, and cycles."""
        by_rank = self._statuses
        chains = [_chain(rank, by_rank) for rank in by_rank]
        return frozenset(rank for chain in chains for rank in _end_of(chain))

    def format(self) -> str:
        return f"{self._why}\n{format_hang_report(build_hang_report(list(self._statuses.values())))}"


def build_hang_report(statuses: Sequence[WorkerStatus]) -> list[HangReportLine]:
    """Returns one line per worker, following each chain of waits to a rank that does not wait."""
    by_rank = {status.rank: status for status in statuses}
    chains = {rank: _chain(rank, by_rank) for rank in by_rank}
    ends = {chain[-1] for chain in chains.values() if len(chain) > 1}
    return [
        HangReportLine(
            rank=status.rank,
            coordinates=status.coordinates,
            doing=status.doing,
            for_s=status.for_s,
            remark=_remark(status, by_rank, chains[status.rank], is_blocking=status.rank in ends),
        )
        for status in statuses
    ]


def format_hang_report(lines_of_report: Sequence[HangReportLine]) -> str:
    """Returns one line per rank, in rank order, with aligned columns."""
    rows = [
        (
            f"rank {each.rank}" + (f" ({each.coordinates})" if each.coordinates else ""),
            f"[{each.doing or '-'}]",
            "" if each.for_s is None else f"{each.for_s:.1f} s",
            each.remark,
        )
        for each in sorted(lines_of_report, key=lambda each: each.rank)
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = []
    for name, doing, for_s, remark in rows:
        cells = [name.ljust(widths[0]), doing.ljust(widths[1]), for_s.rjust(widths[2]), remark]
        lines.append("  " + " ".join(cell for cell in cells if cell).rstrip())
    return "\n".join(lines)


def blockers(status: WorkerStatus, by_rank: Mapping[int, WorkerStatus]) -> tuple[int, ...]:
    """The ranks that this one waits for; in a collective, those that have not entered it."""
    if not status.is_waiting:
        return ()

    def has_entered(rank: int) -> bool:
        other = by_rank.get(rank)
        return bool(status.what and other and other.is_waiting and other.what == status.what)

    return tuple(rank for rank in status.peers if rank != status.rank and not has_entered(rank))


def _chain(rank: int, by_rank: Mapping[int, WorkerStatus]) -> list[int]:
    """A path in the wait-for graph, always to the first blocker; in a cycle it ends with a rank that it has already."""
    chain = [rank]
    while chain[-1] in by_rank and (awaited := blockers(by_rank[chain[-1]], by_rank)):
        chain.append(awaited[0])
        if awaited[0] in chain[:-1]:
            break
    return chain


def _end_of(chain: list[int]) -> list[int]:
    """The rank with which a chain ends, or all of the cycle."""
    return chain[chain.index(chain[-1]) + 1 :] or chain[-1:]


def _remark(
    status: WorkerStatus, by_rank: Mapping[int, WorkerStatus], chain: Sequence[int], *, is_blocking: bool
) -> str:
    if not status.doing:
        return "does not answer" + (", blocks others" if is_blocking else "")
    if not status.is_waiting:
        return "blocks others" if is_blocking else ""
    if not status.peers:
        return f"waits for {status.what}"
    where = f"waits in {status.what}" if status.what else "waits"
    awaited = blockers(status, by_rank)
    if not awaited:
        return f"{where}, which all other ranks have entered"
    others = awaited[1:MAX_NAMED]
    more = [f"rank {rank}" for rank in others] + (["..."] if len(awaited) > MAX_NAMED else [])
    path = " -> ".join(f"rank {rank}" for rank in chain[1:])
    cycle = " (a cycle)" if chain[-1] in chain[:-1] else ""
    return f"{where} for {path}{cycle}" + "".join(f", {each}" for each in more)
