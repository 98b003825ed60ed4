"""Messages of the membership protocol: state reports and generation records. Pure data.

A membership generation is a number that grows with every attempt to change the membership; those that were agreed and
confirmed are *committed*. Attempts that a further death has ended keep their numbers, which are never reused.

    worker                                           coordinator
    report(generation)    ----------------------->   all live workers have reported: decide
                          <- - - - - - - - - - - -   fetch_entries: one that holds the newest, if others lack it
    entries(generation)   - - - - - - - - - - - ->
                          <-----------------------   record(generation), with the entries for those that lack them
    confirm(generation)   ----------------------->   all members have confirmed: committed
                          <-----------------------   commit(generation)

The start of a run is the same: generation 0, to which all workers report without any state. How records travel:
record_delta.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from parallel3d.parallel.grid import Grid, PartId

Json = dict[str, Any]
Address = tuple[str, int]

NO_GENERATION = -1
"""The state generation of a worker that holds no state yet: it initialises its own from the seed."""


@dataclass(frozen=True, kw_only=True, order=True)
class LogPosition:
    """The position of the newest entry that a worker holds; compares lexicographically."""

    iteration: int = 0
    evaluation: int = 0
    """1 if the entry is that of the evaluation after this iteration."""

    def to_json(self) -> Json:
        return {"iteration": self.iteration, "evaluation": self.evaluation}

    @staticmethod
    def from_json(data: Json) -> LogPosition:
        return _read_position(**data)


@lru_cache(maxsize=256, typed=True)
def _read_position(iteration: int, evaluation: int) -> LogPosition:
    """Cached: the reports of thousands of workers have few positions."""
    return LogPosition(iteration=iteration, evaluation=evaluation)


@dataclass(frozen=True, kw_only=True)
class LostWorker:
    """A lost worker, and why it was lost, for messages."""

    rank: int
    why: str

    def to_json(self) -> Json:
        return {"rank": self.rank, "why": self.why}

    @staticmethod
    def from_json(data: Json) -> LostWorker:
        return LostWorker(**data)


@dataclass(frozen=True, kw_only=True)
class StateReport:
    """A worker's state after it has left its generation: nothing changes it any more."""

    rank: int
    generation: int
    """The generation that this report is for."""
    state_generation: int = NO_GENERATION
    """The committed generation by whose shard map it holds ranges of optimizer state."""
    position: LogPosition = LogPosition()
    entries: bytes = b""
    """The newest entries, enough for a worker that is one behind; opaque here. They stay with the worker until the
    coordinator asks for them: only their digest travels with the report."""
    digest: str = ""
    """Digest of `entries`."""
    version: int = 0
    """The iteration up to which all of its ranges are updated."""
    weights_gathered: bool = True
    """True if all of its weights are those of its position, including the ranges that others own."""
    host: str = ""
    address: Address = ("", 0)
    """Where it listens for the generation's point-to-point links."""

    def to_json(self) -> Json:
        return {
            "rank": self.rank,
            "generation": self.generation,
            "state_generation": self.state_generation,
            "position": self.position.to_json(),
            "digest": self.digest,
            "version": self.version,
            "weights_gathered": self.weights_gathered,
            "host": self.host,
            "address": list(self.address),
        }

    @staticmethod
    def from_json(data: Json) -> StateReport:
        host, port = data["address"]
        return StateReport(
            **{
                **data,
                "position": LogPosition.from_json(data["position"]),
                "address": (host, port),
            }
        )


@dataclass(frozen=True, kw_only=True)
class GenerationRecord:
    """The state of a generation, the same for all of its members."""

    generation: int
    grid: Grid
    """The ranks that compute in this generation."""
    previous: Grid | None
    """The grid by whose shard map the members hold their state; None: they hold none and start from the seed."""
    members: tuple[int, ...]
    """All live workers: those of the grid, spares, and draining ones, which only hand over their state."""
    draining: tuple[int, ...] = ()
    evicted: tuple[LostWorker, ...] = ()
    """Workers lost since the last committed generation."""
    position: LogPosition = LogPosition()
    """The newest position that any member holds: all go on from here."""
    weights_gathered: bool = False
    """True if every rank of the grid has all weights of that position, so that none must be sent."""
    hosts: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """Host of every rank that has ever reported, including lost ones."""
    parts: Mapping[int, PartId] = field(default_factory=lambda: MappingProxyType({}))
    """The parts of the model that spares have built."""
    newcomers: tuple[int, ...] = ()
    """Ranks of the grid that have not trained since the start: new workers, and former spares."""
    addresses: Mapping[int, Address] = field(default_factory=lambda: MappingProxyType({}))
    last_reported_step: int = 0
    """The last step that the reporter has received: the leader publishes the later ones."""
    reason: str = ""
    """Why the membership changes, for messages."""

    @property
    def joiners(self) -> tuple[int, ...]:
        """Ranks of the grid that hold nothing by the previous one's shard map: they get all state from others."""
        return () if self.previous is None else tuple(r for r in self.grid.ranks if not self.previous.holds(r))

    @property
    def leader(self) -> int:
        """The lowest rank of the grid that has seen every step, or else the lowest: it publishes for all."""
        return next((r for r in self.grid.ranks if r not in self.newcomers), self.grid.ranks[0])

    @property
    def state_source(self) -> int:
        """The member that sends the train state to the joiners: the lowest one that has trained."""
        return next(r for r in self.members if self.previous is not None and self.previous.holds(r))

    @property
    def spares(self) -> tuple[int, ...]:
        """Members outside the grid that stay."""
        return tuple(r for r in self.members if not self.grid.holds(r) and r not in self.draining)


def find_newcomers(grid: Grid, committed: GenerationRecord | None) -> tuple[int, ...]:
    """Returns the ranks of `grid` that have not been in every grid up to the one of `committed`."""
    if committed is None:
        return ()
    former = frozenset(committed.newcomers)
    return tuple(rank for rank in grid.ranks if rank in former or not committed.grid.holds(rank))


def digest_entries(entries: bytes) -> str:
    """Returns the digest by which reports name entries."""
    return hashlib.sha256(entries).hexdigest()[:16]
