"""What workers and the coordinator tell each other when the membership changes. Pure data, JSON on the wire.

A membership epoch is a number that grows with every attempt to change who takes part; those that were agreed and
confirmed are *committed*. Numbers of attempts that a further death has ended are skipped, never used again.

    worker                                   coordinator
    report(epoch)      ------------------>   all live workers have reported: decide
                       <------------------   record(epoch)
    confirm(epoch)     ------------------>   all members have confirmed: committed
                       <------------------   go(epoch)

The start of a run is the same: epoch 0, to which everybody reports with nothing in its hands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from parallel3d.topology.grid import Grid

Json = dict[str, Any]
Address = tuple[str, int]

NOTHING = -1
"""The cut epoch of a worker that holds no state yet: it makes its own from the seed."""


@dataclass(frozen=True, kw_only=True, order=True)
class Position:
    """The newest entry that a worker holds; compares lexicographically."""

    iteration: int = 0
    evaluation: int = 0
    """1 once the evaluation after this iteration is held."""

    def to_json(self) -> Json:
        return {"iteration": self.iteration, "evaluation": self.evaluation}

    @staticmethod
    def from_json(data: Json) -> Position:
        return Position(**data)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One worker that is no longer there, and why, in words."""

    rank: int
    why: str

    def to_json(self) -> Json:
        return {"rank": self.rank, "why": self.why}

    @staticmethod
    def from_json(data: Json) -> Loss:
        return Loss(**data)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker says of itself once it has sealed: nothing of it moves any more."""

    rank: int
    epoch: int
    """The epoch that this report is for."""
    cut_epoch: int = NOTHING
    """The committed epoch by whose cut it holds ranges of optimizer state."""
    position: Position = Position()
    entries: tuple[Json, ...] = ()
    """The entries that make up its position, newest last; opaque here. Enough for a worker that is one behind."""
    version: int = 0
    """The iteration to which all of its ranges have been updated."""
    weights_whole: bool = True
    """All of its weights are those of its position, the ranges that others own included."""
    host: str = ""
    address: Address = ("", 0)
    """Where it listens for the epoch's point-to-point links."""

    def to_json(self) -> Json:
        return {
            "rank": self.rank,
            "epoch": self.epoch,
            "cut_epoch": self.cut_epoch,
            "position": self.position.to_json(),
            "entries": list(self.entries),
            "version": self.version,
            "weights_whole": self.weights_whole,
            "host": self.host,
            "address": list(self.address),
        }

    @staticmethod
    def from_json(data: Json) -> Report:
        host, port = data["address"]
        return Report(
            **{
                **data,
                "position": Position.from_json(data["position"]),
                "entries": tuple(data["entries"]),
                "address": (host, port),
            }
        )


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """All that the members of an epoch must know, the same for each of them."""

    epoch: int
    grid: Grid
    """Who computes in this epoch."""
    previous: Grid | None
    """The grid by whose cut the members hold their state; None: nobody holds any, all start from the seed."""
    members: tuple[int, ...]
    """Every live worker: those of the grid, spares, and leavers, who only hand over what they hold."""
    leavers: tuple[int, ...] = ()
    evicted: tuple[Loss, ...] = ()
    """Who was lost since the last committed epoch."""
    position: Position = Position()
    """The newest position that any member holds: everybody goes on from here."""
    entries: tuple[Json, ...] = ()
    """The entries of the member that holds it."""
    weights_whole: bool = False
    """Every rank of the grid has all weights of that position: none need travel."""
    hosts: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """Host of every rank that has ever reported, lost ones included."""
    addresses: Mapping[int, Address] = field(default_factory=lambda: MappingProxyType({}))
    last_told: int = 0
    """The last step of which the run's report has heard: whoever leads tells the rest."""
    reason: str = ""
    """Why the membership changes, for a person."""

    @property
    def spares(self) -> tuple[int, ...]:
        """Members without a place in the grid that stay."""
        return tuple(r for r in self.members if not self.grid.holds(r) and r not in self.leavers)

    def to_json(self) -> Json:
        return {
            "epoch": self.epoch,
            "grid": grid_to_json(self.grid),
            "previous": None if self.previous is None else grid_to_json(self.previous),
            "members": list(self.members),
            "leavers": list(self.leavers),
            "evicted": [loss.to_json() for loss in self.evicted],
            "position": self.position.to_json(),
            "entries": list(self.entries),
            "weights_whole": self.weights_whole,
            "hosts": [[rank, host] for rank, host in sorted(self.hosts.items())],
            "addresses": [[rank, *address] for rank, address in sorted(self.addresses.items())],
            "last_told": self.last_told,
            "reason": self.reason,
        }

    @staticmethod
    def from_json(data: Json) -> EpochRecord:
        return EpochRecord(
            epoch=data["epoch"],
            grid=grid_from_json(data["grid"]),
            previous=None if data["previous"] is None else grid_from_json(data["previous"]),
            members=tuple(data["members"]),
            leavers=tuple(data["leavers"]),
            evicted=tuple(Loss.from_json(loss) for loss in data["evicted"]),
            position=Position.from_json(data["position"]),
            entries=tuple(data["entries"]),
            weights_whole=data["weights_whole"],
            hosts={rank: host for rank, host in data["hosts"]},
            addresses={rank: (host, port) for rank, host, port in data["addresses"]},
            last_told=data["last_told"],
            reason=data["reason"],
        )


def grid_to_json(grid: Grid) -> list[list[list[int]]]:
    """For each stage a list of [replica id, rank, rank, ...]."""
    return [[[replica, *stage[replica]] for replica in sorted(stage)] for stage in grid.stages]


def grid_from_json(data: list[list[list[int]]]) -> Grid:
    return Grid(tuple(MappingProxyType({row[0]: tuple(row[1:]) for row in stage}) for stage in data))
