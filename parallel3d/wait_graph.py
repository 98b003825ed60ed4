"""Who is where and waits for whom: the table by which a hang or a deadlock is told. Pure.

rank 0 (pp0 dp0 tp0) [step 7, receive gradient 3 <- (1, 0)] 31.2 s waits for rank 2
rank 1 (pp0 dp1 tp0) [step 7, all_reduce]                   31.0 s waits in generation0/world for rank 0 -> rank 2, ...
rank 2 (pp1 dp0 tp0) [step 7, forward 3]                    31.3 s: the others wait for it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class HangReportLine:
    """One line of the table."""

    rank: int
    coordinates: str = ""
    """Its coordinates."""
    doing: str = ""
    """The instruction or phase that it is in."""
    for_s: float | None = None
    remark: str = ""
    """What it waits for, or what else there is to say."""


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """What a worker says when it is asked where it is; `doing` "" stands for one that does not answer."""

    rank: int
    coordinates: str = ""
    doing: str = ""
    for_s: float | None = None
    is_waiting: bool = False
    what: str = ""
    """The name of the group whose collective it waits in; "" for a message. Without peers: what it waits for."""
    peers: tuple[int, ...] = ()
    """The ranks that it may be waiting for."""


def format_hang_report(lines_of_report: Sequence[HangReportLine]) -> str:
    """One line a rank, in rank order, columns aligned."""
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


def build_hang_report(statuses: Sequence[WorkerStatus]) -> list[HangReportLine]:
    """The lines for workers that have been asked: chains of waits followed to whoever waits for nobody."""
    by_rank = {status.rank: status for status in statuses}
    chains = {rank: _chain(rank, by_rank) for rank in by_rank}
    ends = {chain[-1] for chain in chains.values() if len(chain) > 1}
    return [
        HangReportLine(
            rank=status.rank,
            coordinates=status.coordinates,
            doing=status.doing,
            for_s=status.for_s,
            remark=_remark(status, by_rank, chains[status.rank], is_awaited=status.rank in ends),
        )
        for status in statuses
    ]


def blockers(status: WorkerStatus, by_rank: Mapping[int, WorkerStatus]) -> tuple[int, ...]:
    """The ranks that this one waits for: of a collective, those that are not in it themselves."""
    if not status.is_waiting:
        return ()

    def is_there(rank: int) -> bool:
        other = by_rank.get(rank)
        return bool(status.what and other and other.is_waiting and other.what == status.what)

    return tuple(rank for rank in status.peers if rank != status.rank and not is_there(rank))


def _chain(rank: int, by_rank: Mapping[int, WorkerStatus]) -> list[int]:
    """From a rank to the first that it waits for, and so on; where it is a circle, it ends with one met before."""
    chain = [rank]
    while chain[-1] in by_rank and (awaited := blockers(by_rank[chain[-1]], by_rank)):
        chain.append(awaited[0])
        if awaited[0] in chain[:-1]:
            break
    return chain


def _remark(
    status: WorkerStatus, by_rank: Mapping[int, WorkerStatus], chain: Sequence[int], *, is_awaited: bool
) -> str:
    if not status.doing:
        return "does not answer" + (": others wait for it" if is_awaited else "")
    if not status.is_waiting:
        return "others wait for it" if is_awaited else ""
    if not status.peers:
        return f"waits for {status.what}"
    where = f"waits in {status.what}" if status.what else "waits"
    awaited = blockers(status, by_rank)
    if not awaited:
        return f"{where}, where all others are"
    others = awaited[1:MAX_NAMED]
    more = [f"rank {rank}" for rank in others] + (["..."] if len(awaited) > MAX_NAMED else [])
    path = " -> ".join(f"rank {rank}" for rank in chain[1:])
    circle = " (a circle)" if chain[-1] in chain[:-1] else ""
    return f"{where} for {path}{circle}" + "".join(f", {each}" for each in more)
