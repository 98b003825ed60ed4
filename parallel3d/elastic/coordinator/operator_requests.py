"""Answers what people ask of a run by a command (operator_link.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parallel3d.elastic.coordinator.connection import Connection
from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.drain_manager import DrainManager
from parallel3d.elastic.coordinator.membership_manager import MembershipManager
from parallel3d.elastic.coordinator.run_status import RunStatus
from parallel3d.elastic.drain_target import MAX_NAMED, DrainTarget, choose_workers

Json = dict[str, Any]


class OperatorRequests:
    """Handles the requests of connections that have proven the run's secret."""

    def __init__(
        self, server: ConnectionServer, status: RunStatus, *, emit: Callable[[Json], None], drains: DrainManager
    ):
        self._server = server
        self._status = status
        self._emit = emit
        self._drains = drains

    def handle(self, connection: Connection, header: Json, membership: MembershipManager | None) -> None:
        """Handles one request; `membership`: None while no worker may leave."""
        match header["op"]:
            case "reserve_worker":
                answer: Json = {"rank": self._status.reserve_worker()}
            case "drain":
                answer = self._drain(DrainTarget.from_json(header["target"]), membership)
        self._server.send(connection, {"op": "answer", **answer})

    def _drain(self, target: DrainTarget, membership: MembershipManager | None) -> Json:
        """Has workers leave; returns what leaves and when, or why nothing does."""
        committed = membership.protocol.committed if membership else None
        if membership is None or committed is None or membership.protocol.over or self._status.stop_signal is not None:
            return {"refused": True, "text": "the run has not begun, or is about to end"}
        workers = self._status.workers
        hosts = {
            rank: worker.host
            for rank, worker in workers.items()
            if not worker.ended and (rank in membership.protocol.live or membership.is_joining(rank))
        }
        choice = choose_workers(target, committed.grid, hosts)
        if reason := choice.refusal or membership.drain(choice.ranks):
            return {"refused": True, "text": reason if choice.refusal else f"the run needs {target}: without, {reason}"}
        moves = target.host is not None and self._drains.empty_host(target.host, membership)
        text = f"{self._list(choice.ranks)} at the next step boundary, after step {self._status.last_step or 0}"
        self._emit({"kind": "drain", "text": f"{target} by command: {text}", "ranks": list(choice.ranks)})
        return {"refused": False, "text": f"{text}; so does the run's coordinator" if moves else text}

    def _list(self, ranks: Sequence[int]) -> str:
        names = [self._status.name(rank) for rank in ranks[:MAX_NAMED]]
        more = [f"{len(ranks) - MAX_NAMED:,} more"] if len(ranks) > MAX_NAMED else []
        return f"{', '.join(names + more)} leave{'s' if len(ranks) == 1 else ''}"
