"""Tracks what a worker's main thread is doing and which peers it waits for, for hang reports.

The main thread writes, one assignment per instruction; the control channel's thread reads. So a worker answers status
requests while its main thread hangs, as long as Python runs at all.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from parallel3d.parallel.abort import Wait


class WorkerStatusTracker:
    """Created on the main thread, the only one whose waits are recorded."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._step = 0
        self._doing: tuple[object, float] = ("starting", time.monotonic())
        self._wait: Wait | None = None

    def begin(self, phase: object, step: int) -> None:
        """Records that a step, or the evaluation after it, begins."""
        self._step = step
        self.enter(phase)

    def enter(self, what: object) -> None:
        """Records the current instruction or phase; it is formatted only on request."""
        self._doing = (what, time.monotonic())

    def on_wait(self, wait: Wait | None) -> None:
        """Records that a wait for peers begins, or (None) ends."""
        if threading.get_ident() == self._owner:
            self._wait = wait

    def report(self) -> dict[str, Any]:
        """Returns the status in the form that `HangReport.add` reads."""
        (doing, since_s), wait = self._doing, self._wait
        return {
            "doing": f"step {self._step}, {doing}" if self._step else str(doing),
            "for_s": time.monotonic() - since_s,
            "is_waiting": wait is not None,
            "what": wait.what if wait else "",
            "peers": list(wait.ranks) if wait else [],
        }
