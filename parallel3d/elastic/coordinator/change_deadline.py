"""Ends a change of membership's wait for workers that do not answer: first it asks what they do, then evicts some.

Workers that wait for a peer may be waiting for one that hangs: only those at the end of a chain of waits are blamed.
"""

from __future__ import annotations

from typing import Any

from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.fences import Fences
from parallel3d.elastic.hang_report import HangReport
from parallel3d.elastic.protocol.state_machine import MembershipProtocol


class ChangeDeadline:
    """Bounds each wait of a change, for all reports and for all confirmations, to `change_s` seconds."""

    def __init__(self, server: ConnectionServer, fences: Fences, *, change_s: float):
        self._server = server
        self._fences = fences
        self._change_s = change_s
        self._awaited: object = None
        """The wait under way: the generation, and what it waits for."""
        self._deadline_s = float("inf")
        self._report: HangReport | None = None
        """What the workers do, after the deadline."""

    def add_status(self, rank: int, status: dict[str, Any]) -> None:
        if self._report:
            self._report.add(rank, status)

    def check(self, protocol: MembershipProtocol, now_s: float) -> None:
        """Asks and evicts; call it in each of the coordinator's turns."""
        if (awaited := protocol.awaited) != self._awaited:
            self._awaited, self._report = awaited, None
            self._deadline_s = now_s + self._change_s if awaited else float("inf")
        elif self._report is None:
            if now_s > self._deadline_s:
                self._report = HangReport("", protocol.live, {}, now_s)
                self._server.send_to_workers(protocol.live, {"op": "request_status"})
        elif self._report.is_over(now_s):
            unanswered = protocol.unanswered
            blamed = unanswered & self._report.blocking_ranks() or unanswered
            why = f"no answer to the change to generation {protocol.pending} within {self._change_s:g} s"
            self._fences.kill({rank: why for rank in blamed})
            self._report, self._deadline_s = None, now_s + self._change_s
