"""The coordinator that takes over: a thread of the process of a guardian whose host comes next in the roster.

It begins with a muster: guardians connect, then their workers, each of which brings the record of its newest committed
epoch. The newest of all is the one to go on from: whoever holds it proves that all members had confirmed it. Then
everybody on the lost host is evicted by an ordinary change of membership, and it is a coordinator like any other.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from parallel3d.elastic.coordinator import Coordinator, ElasticSettings, Limits
from parallel3d.elastic.membership import EpochRecord
from parallel3d.elastic.protocol import Action, Protocol, Release
from parallel3d.elastic.succession import GuardianPlace, Quorum, Roster, Witness, may_serve
from parallel3d.elastic.switchboard import Peer
from parallel3d.monitor.sinks import RunReport

MUSTER_TICK_S = 0.1


class ResumedProtocol(Protocol):
    """Goes on from `committed`; `announced` is the newest number of an epoch that any worker has heard of."""

    def __init__(self, elastic: ElasticSettings, committed: EpochRecord, *, announced: int):
        super().__init__(
            elastic.grid, zero_stage=elastic.zero_stage, zero_backups=elastic.zero_backups, enabled=elastic.enabled
        )
        self.live = frozenset(committed.members) - set(committed.leavers)
        self.committed = committed
        self.last_told = committed.last_told
        self._grid = committed.grid
        self._epoch = max(announced, committed.epoch)
        self._hosts = committed.hosts
        self._newest = committed.position

    def begin(self, reason: str) -> list[Action]:
        """A change that nobody in particular has asked for."""
        return self._begin(reason)


class Successor(Coordinator):
    """Takes over what `roster` describes, or ends the run on this side. `open_report` is called when it serves."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        roster: Roster,
        witness: Witness,
        open_report: Callable[[], RunReport],
        world_size: int,
        limits: Limits,
        elastic: ElasticSettings,
        own: GuardianPlace,
    ):
        super().__init__(
            listener, world_size=world_size, emit=lambda record: None, limits=limits, elastic=elastic, own=own
        )
        self._roster = roster
        self._lost_host = roster.coordinator.host
        self._lost_s = time.monotonic()
        self._witness = witness
        self._open_report = open_report
        self._mustering = True
        self._held: list[tuple[Peer, dict[str, Any], bytes]] = []
        """What was said before it could be answered."""

    def _make_protocol(self, elastic: ElasticSettings) -> Protocol | None:
        return None  # not before it is known from where to go on

    def _hear(self, peer: Peer, header: dict[str, Any], payload: bytes) -> None:
        if self._mustering and header["op"] != "hello":
            self._held.append((peer, header, payload))
        else:
            super()._hear(peer, header, payload)

    def _lose_peer(self, peer: Peer) -> None:
        if not self._mustering:
            super()._lose_peer(peer)

    def _begin(self) -> None:
        deadline = time.monotonic() + self._limits.muster_s
        while not self._complete() and time.monotonic() < deadline:
            self._board.turn(MUSTER_TICK_S)
        self._mustering = False
        quorum, base = self._quorum(), self._newest_record()
        if quorum.enough and base:
            self._go_on(base)
        else:
            self._give_up(quorum.reason or "no worker is left that has begun")
        for peer, header, payload in self._held:
            self._board.deliver(peer, header, payload)

    def _go_on(self, base: EpochRecord) -> None:
        assert self._elastic is not None
        announced = max(peer.hello["standing"]["announced"] for peer in self._board.workers().values())
        protocol = self._protocol = ResumedProtocol(self._elastic, base, announced=announced)
        report = self._open_report()
        self._emit = report.publish
        protocol.last_told = self._last_told["step"] = max(base.last_told, report.last_step)
        self._book.note_taken_over(base.hosts, protocol.last_told)
        self._book.note_gone(set(self._book.workers) - protocol.live)
        self._start_deadline = time.monotonic() + self._limits.muster_s
        self._notice(f"the run goes on without its coordinator on {self._lost_host}, from epoch {base.epoch}")
        behind = [rank for rank, record in self._records().items() if record.epoch < base.epoch]
        self._tell(behind, {"op": "go", "epoch": base.epoch})
        present = {rank for peer in self._board.guardians() for rank in peer.guarded}
        lost = [self._book.death_with_guardian(rank) for rank in sorted(protocol.live - present)]
        self._chronicle.begin(self._lost_s)
        if self._was_released():
            protocol.over = True
            self._act([Release(ranks=tuple(sorted(protocol.live)))])
        if lost:
            self._lose(lost)
        elif not protocol.over:
            self._act(protocol.begin(f"the coordinator on {self._lost_host} is lost"))

    def _give_up(self, reason: str) -> None:
        """This side ends; its workers are told, those out of reach have guardians of their own."""
        self._book.note_lost_quorum(reason)
        self._book.note_gone(self._book.workers)
        self._abort_after_failure()

    def _complete(self) -> bool:
        """Everybody who may still come is there."""
        present = {rank for peer in self._board.guardians() for rank in peer.guarded}
        expected = {rank for place in self._roster.survivors for rank in place.ranks}
        there = self._board.workers().keys() | {end["rank"] for end in self._ends()}
        return expected <= present and present <= there and self._quorum().enough

    def _quorum(self) -> Quorum:
        reached = {peer.hello["host"] for peer in self._board.guardians()}
        return may_serve(reached, self._roster.hosts, take_witness=self._witness.take)

    def _ends(self) -> list[dict[str, Any]]:
        """What guardians have said of workers that have ended."""
        return [end for _, header, _ in self._held if header["op"] == "ended" for end in header["ends"]]

    def _was_released(self) -> bool:
        """Whether the old coordinator had already let everybody go: nobody ends well before that."""
        assert self._protocol is not None
        return any(end["exit_code"] == 0 and end["rank"] in self._protocol.live for end in self._ends())

    def _records(self) -> dict[int, EpochRecord]:
        """The record of the newest committed epoch that each worker knows."""
        standings = {rank: peer.hello["standing"]["committed"] for rank, peer in self._board.workers().items()}
        return {rank: EpochRecord.from_json(record) for rank, record in standings.items() if record}

    def _newest_record(self) -> EpochRecord | None:
        return max(self._records().values(), key=lambda record: record.epoch, default=None)
