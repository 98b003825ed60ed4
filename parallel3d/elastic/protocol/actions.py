"""The actions that the membership protocol returns, for the coordinator to carry out. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.elastic.protocol.membership import GenerationRecord


@dataclass(frozen=True, kw_only=True)
class AbortGeneration:
    """End these workers' generation and make them report to `generation`."""

    ranks: tuple[int, ...]
    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class FetchEntries:
    """Ask this worker for the entries that it has reported."""

    rank: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class Propose:
    """Send the record to its members, the entries with it to those that are behind."""

    record: GenerationRecord
    base: GenerationRecord | None
    """The last committed record, which all members hold."""
    behind: tuple[int, ...] = ()
    entries: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Notify the members that all have confirmed; draining members leave with this."""

    generation: int
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DrainRequest:
    """Ask this worker, which should leave, to request a change at its next step boundary."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class ChangeRequest:
    """Ask this worker, the leader, to request a change at a step boundary: workers leave, or could fill vacancies."""

    rank: int
    generation: int
    """The request is void in any other one."""


@dataclass(frozen=True, kw_only=True)
class DrainRefused:
    """The run can't go on without this worker, which should leave: the caller stops the run instead.

    An earlier DrainRequest to this worker is void.
    """

    rank: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StopRun:
    """The run can't go on."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class FinishRun:
    """All workers are done: these may end."""

    ranks: tuple[int, ...]


Action = (
    AbortGeneration
    | FetchEntries
    | Propose
    | Commit
    | DrainRequest
    | ChangeRequest
    | DrainRefused
    | StopRun
    | FinishRun
)
