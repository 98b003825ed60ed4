"""Answers what people ask of a run by a command (operator_link.py)."""

from __future__ import annotations

from typing import Any

from parallel3d.elastic.coordinator.connection import Connection
from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.run_status import RunStatus


class OperatorRequests:
    """Handles the requests of connections that have proven the run's secret."""

    def __init__(self, server: ConnectionServer, status: RunStatus):
        self._server = server
        self._status = status

    def handle(self, connection: Connection, header: dict[str, Any]) -> None:
        """Handles one request."""
        match header["op"]:
            case "reserve_worker":
                answer = {"rank": self._status.reserve_worker()}
        self._server.send(connection, {"op": "answer", **answer})
