"""How the coordinator ends a run: a stop after the current step, or an abort after a failure."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import Any

from parallel3d.elastic.coordinator.connection import Connection
from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.preemptions import Preemptions
from parallel3d.elastic.coordinator.run_status import RunOutcome, RunStatus
from parallel3d.errors import EXIT_COORDINATOR_LOST, EXIT_PREEMPTED


class Shutdown:
    """Stops or aborts the run, each once. Workers have `abort_grace_s` to exit after an abort."""

    def __init__(
        self,
        server: ConnectionServer,
        status: RunStatus,
        *,
        emit: Callable[[dict[str, Any]], None],
        abort_grace_s: float,
    ):
        self._server = server
        self._status = status
        self._emit = emit
        self._abort_grace_s = abort_grace_s
        self.preemptions = Preemptions()
        self.aborting = False

    def stop(self, signal_number: int, *, at_once: bool = False, preempted: str = "") -> None:
        """Stops the run after its step; `at_once` aborts it. `preempted`: hosts that are taken away, if that is why."""
        if self._status.stop_signal is None and not self.aborting:
            self._status.record_stop_signal(signal_number, preempted=preempted)
            text = "stopping after this step; press Ctrl-C again to stop at once"
            if preempted:
                text = f"{preempted}: the run can't go on without, saves and ends with exit code {EXIT_PREEMPTED}"
            self._emit({"kind": "notice", "text": text})
            self._server.broadcast({"op": "stop"})
        if at_once:
            self.aborting = True
            self._server.broadcast(self._abort_frame(0.0))

    def stop_without(self, ranks: Iterable[int]) -> None:
        """Stops the run after its step, since these workers must leave and it can't go on without them."""
        self.stop(signal.SIGTERM, preempted=self.preemptions.why(ranks))

    def abort_after_failure(self) -> None:
        """Aborts the run if it has a failure that it can't survive."""
        if self._status.failures and not self.aborting:
            self.aborting = True
            self._emit({"event": "failure", "text": self._status.failures[0].message})
            self._server.broadcast(self._abort_frame(self._abort_grace_s))

    def turn_away(self, connection: Connection) -> None:
        """Ends a guardian that has come back too late: the run goes on without its ranks."""
        why = self._status.why_without(connection.guarded_ranks)
        self._server.send(connection, {"op": "over", "exit_code": EXIT_COORDINATOR_LOST, "why": why})

    def end_guardians(self, outcome: RunOutcome, *, own_host: str) -> None:
        """Has all guardians end with the run's exit code. After a failure, whose text this host's terminal gets, the
        first guardian of each other host prints the first line of it there."""
        over = {"op": "over", "exit_code": outcome.exit_code}
        has_failed = bool(outcome.message) and self._status.stop_signal is None
        speakers: dict[str, Connection] = {}
        for connection in self._server.guardians() if has_failed and own_host else ():
            speakers.setdefault(connection.hello["host"], connection)
        speakers.pop(own_host, None)
        for connection in speakers.values():
            why = f"the run has ended with exit code {outcome.exit_code}: {outcome.message.splitlines()[0]}"
            self._server.send(connection, {**over, "why": why})
        self._server.send_to_guardians(over)  # encoded once for all; to those that have it already it says nothing new

    def current_frames(self) -> list[dict[str, Any]]:
        """The frames that a late connection has missed."""
        return [
            *([{"op": "stop"}] if self._status.stop_signal is not None else []),
            *([self._abort_frame(self._abort_grace_s)] if self.aborting else []),
        ]

    def _abort_frame(self, grace_s: float) -> dict[str, Any]:
        reason = self._status.failures[0].message if self._status.failures else "stopped at once"
        return {"op": "abort", "reason": reason, "grace_s": grace_s}
