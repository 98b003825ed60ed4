"""Pauses of what writes or uploads while training continues. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class WriteThrottle:
    """Pauses that limit a thread to a `share` (0 to 1) of the time, until `stop_throttling`.

    Of the variants tried (docs/experiments.md) this slows training least: a thread of low priority also gets its share,
    but in slices that delay the other threads of a team.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic):
        self._pause_ratio = 1.0 / share - 1.0
        self._clock = clock
        self._unthrottled = threading.Event()
        self._last_pause_end_s: float | None = None

    def throttle(self) -> None:
        """Sleeps in proportion to the work since the last call (not in the first), or until `stop_throttling`."""
        if self._last_pause_end_s is not None and self._pause_ratio and not self._unthrottled.is_set():
            self._unthrottled.wait(self._pause_ratio * (self._clock() - self._last_pause_end_s))
        self._last_pause_end_s = self._clock()

    def stop_throttling(self) -> None:
        """Ends the current pause and all later ones."""
        self._unthrottled.set()
