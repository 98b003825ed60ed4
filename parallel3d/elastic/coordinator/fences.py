"""Ends workers that the run can't wait for. Their guardians kill them first; the report of that exit is the loss.

So none of them wakes up in a generation that is over. A guardian that does not obey is silent, and lost itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.run_status import RunStatus
from parallel3d.errors import OutOfPlaceError

BROKEN_CHANNEL_S = 2.0
"""How long a worker whose connection broke may take to be reported as ended by its guardian."""


class Fences:
    """Keeps the reasons for which workers are to be killed."""

    def __init__(self, server: ConnectionServer, status: RunStatus):
        self._server = server
        self._status = status
        self._broken: dict[int, tuple[float, str]] = {}
        """Workers without a connection: the time at which they are killed, and why."""
        self._connected: set[int] = set()
        self._finished: set[int] = set()
        self.reasons: dict[int, str] = {}
        """Why each of these workers had to end."""

    def kill(self, why: Mapping[int, str]) -> None:
        """Has the guardians of these ranks kill them, each with its reason."""
        self.reasons |= why
        for connection in self._server.guardians() if why else ():
            if ends := [[rank, why[rank]] for rank in connection.guarded_ranks if rank in why]:
                self._server.send(connection, {"op": "kill", "ends": ends})

    def on_connection_lost(self, rank: int, because: str, now_s: float) -> None:
        """Notes that a worker's connection is gone. Its guardian is likely to report its end in a moment."""
        self._connected.discard(rank)
        if rank in self._finished:
            return
        why = f"its connection to the coordinator broke{because and f' ({because})'}"
        self.reasons[rank] = why
        self._broken[rank] = now_s + (0.0 if because else BROKEN_CHANNEL_S), why

    def on_guardian_lost(self, ranks: Iterable[int]) -> None:
        """Notes that these are out of reach: with another connection their guardian may bring them again."""
        self._connected.difference_update(ranks)

    def on_finish(self, rank: int) -> None:
        """Notes that a worker is about to end: it may close its connection."""
        self._finished.add(rank)

    def on_connected(self, rank: int) -> None:
        """Notes a worker's connection, and forgets an earlier break. Raises OutOfPlaceError if it has one already."""
        if rank in self._connected:
            raise OutOfPlaceError(f"a second hello from rank {rank}")
        self._connected.add(rank)
        self._broken.pop(rank, None)
        self.reasons.pop(rank, None)

    def check(self, now_s: float) -> None:
        """Kills workers that have been without a connection for too long although the run needs them."""
        due = {rank: why for rank, (due_s, why) in self._broken.items() if now_s >= due_s}
        for rank in due:
            del self._broken[rank]
        self.kill({rank: why for rank, why in due.items() if self._needs(rank)})

    def _needs(self, rank: int) -> bool:
        return self._status.is_needed(rank) and not self._status.workers[rank].ended
