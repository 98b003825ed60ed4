"""Takes a membership protocol through its steps: reports, confirmations, losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallel3d.elastic.protocol.actions import Action, FetchEntries, Propose
from parallel3d.elastic.protocol.membership import (
    NO_GENERATION,
    GenerationRecord,
    LogPosition,
    LostWorker,
    StateReport,
    digest_entries,
)
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.parallel.grid import Grid

GRID = Grid.uniform(tp_size=1, pp_size=2, dp_size=3)  # stage 0: ranks 0 1 2, stage 1: ranks 3 4 5


def make(
    grid: Grid = GRID, *, zero_stage: int = 1, zero_backups: int = 1, enabled: bool = True, **settings: Any
) -> MembershipProtocol:
    return MembershipProtocol(grid, zero_stage=zero_stage, zero_backups=zero_backups, enabled=enabled, **settings)


def started(grid: Grid = GRID, **settings: int) -> MembershipProtocol:
    """A protocol whose generation 0 is running."""
    protocol = make(grid, **settings)
    agree(protocol)
    return protocol


def make_report(
    protocol: MembershipProtocol, rank: int, iteration: int = 0, evaluation: int = 0, **fields: object
) -> StateReport:
    assert protocol.pending is not None
    entries = encode_position(LogPosition(iteration=iteration, evaluation=evaluation))
    report = StateReport(
        rank=rank,
        generation=protocol.pending,
        state_generation=NO_GENERATION if protocol.committed is None else protocol.committed.generation,
        position=LogPosition(iteration=iteration, evaluation=evaluation),
        entries=entries,
        digest=digest_entries(entries),
        host=f"host{rank}",
        address=(f"host{rank}", 1000 + rank),
    )
    return replace(report, **fields)


def encode_position(position: LogPosition) -> bytes:
    """Stands for the entries up to a position."""
    return f"{position.iteration} {position.evaluation}".encode()


def send_entries(protocol: MembershipProtocol, actions: list[Action]) -> list[Action]:
    """The actions that follow once a worker has sent its entries, if it was asked for them."""
    match actions:
        case [FetchEntries(rank=rank, generation=generation)]:
            return protocol.entries(rank, generation, protocol._lead.entries)
    return actions


def report_all(protocol: MembershipProtocol, iteration: int = 0, **fields: object) -> list[Action]:
    actions: list[Action] = []
    for rank in sorted(protocol.live):
        assert actions == []  # the last one decides
        actions = protocol.report(make_report(protocol, rank, iteration, **fields))
    return send_entries(protocol, actions)


def confirm_all(protocol: MembershipProtocol) -> list[Action]:
    generation, actions = protocol.pending, []
    for rank in sorted(protocol.live):
        assert actions == [] and generation is not None
        actions = protocol.confirm(rank, generation, "plan")
    return actions


def agree(protocol: MembershipProtocol, iteration: int = 0, **fields: object) -> GenerationRecord:
    """Takes the change under way to its commit."""
    *_, opened = report_all(protocol, iteration, **fields)
    assert isinstance(opened, Propose)
    confirm_all(protocol)
    assert protocol.committed is opened.record
    return opened.record


def on_lost(protocol: MembershipProtocol, *ranks: int) -> list[Action]:
    return protocol.on_lost([LostWorker(rank=rank, why="killed") for rank in ranks])


def uniform(pp: int, dp: int, tp: int = 1) -> Grid:
    return Grid.uniform(tp_size=tp, pp_size=pp, dp_size=dp)
