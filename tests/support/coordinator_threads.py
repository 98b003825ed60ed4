"""A coordinator that serves on a thread of the test."""

from __future__ import annotations

import threading

from parallel3d.elastic.coordinator.coordinator import Coordinator
from parallel3d.elastic.coordinator.run_status import RunOutcome


class ServingThread:
    """Serves until the run is over."""

    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator
        self._thread = threading.Thread(target=coordinator.serve, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> RunOutcome:
        """Waits for the run's end, at most `timeout_s`; returns its outcome as far as known."""
        self._thread.join(timeout_s)
        return self._coordinator._status.outcome()
