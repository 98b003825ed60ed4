"""Where a worker is: what its own thread is doing, since when, and for whom it waits; asked by the coordinator.

The worker's thread writes it, an assignment for each instruction; the control channel's thread reads it, so that a
worker answers while its own thread hangs, as long as Python runs at all.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from parallel3d.parallel.abort import Wait
from parallel3d.wait_graph import WorkerStatus


class WorkerStatusTracker:
    """Made on the worker's own thread, whose waits are the ones that count."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._step = 0
        self._doing: tuple[object, float] = ("starting", time.monotonic())
        self._wait: Wait | None = None

    def begin(self, phase: object, step: int) -> None:
        """A step, or an evaluation after it, begins."""
        self._step = step
        self.enter(phase)

    def enter(self, what: object) -> None:
        """An instruction or a phase begins; it is made text only when somebody asks."""
        self._doing = (what, time.monotonic())

    def on_wait(self, wait: Wait | None) -> None:
        """A wait for peers begins, or (None) ends."""
        if threading.get_ident() == self._owner:
            self._wait = wait

    def report(self) -> dict[str, Any]:
        """What `parse_worker_status` reads."""
        (doing, since_s), wait = self._doing, self._wait
        return {
            "doing": f"step {self._step}, {doing}" if self._step else str(doing),
            "for_s": time.monotonic() - since_s,
            "is_waiting": wait is not None,
            "what": wait.what if wait else "",
            "peers": list(wait.ranks) if wait else [],
        }


def parse_worker_status(rank: int, coordinates: str, status: dict[str, Any]) -> WorkerStatus:
    """One worker's answer as it came through the control channel."""
    return WorkerStatus(
        rank=rank,
        coordinates=coordinates,
        doing=status["doing"],
        for_s=status["for_s"],
        is_waiting=status["is_waiting"],
        what=status["what"],
        peers=tuple(status["peers"]),
    )
