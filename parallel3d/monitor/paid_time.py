"""The seconds that a run is paid for: those of all of its legs, without the time between them. Pure.

A leg is what one `train` command does until it ends; a resume begins a further leg of the same metrics.jsonl. A leg
begins with its line `started` and ends with its last line, whatever that is: a leg that was killed has no line `ended`.
Lines of steps have no time of their own; the seconds of each count from the line before it on.

    |-- leg: started ... last line --|   not paid for   |-- leg: started ... last line --|

A resume from a checkpoint leaves the lines after it behind. They were paid for, so that it writes how long they took:

    {"event": "left_behind", "step": 10, "seconds": 340.5}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PaidTime:
    """The seconds of the lines so far. Lines before the first `started` have no known time and don't count."""

    def __init__(self) -> None:
        self.num_legs = 0
        self._earlier_s = 0.0
        """Seconds of the legs before the newest one, and of lines that were left behind."""
        self._leg_started_at = self._leg_ended_at = 0.0
        """Of the newest leg, in seconds since the epoch; its end is that of its last line so far."""

    def log(self, line: Mapping[str, Any]) -> None:
        """Adds a line of metrics.jsonl."""
        match line:
            case {"event": "started", "time": time}:
                self._earlier_s = self.seconds()
                self.num_legs += 1
                self._leg_started_at = self._leg_ended_at = float(time)
            case {"event": "left_behind", "seconds": seconds}:
                self._earlier_s += float(seconds)
            case {"time": time}:
                self._leg_ended_at = float(time)
            case {"event": "evaluation", "seconds": seconds}:
                self._leg_ended_at += float(seconds)
            case {"event": _}:
                return
            case {"step": _}:
                self._leg_ended_at += float(line.get("step_s", 0.0))

    def seconds(self, now: float | None = None) -> float:
        """The seconds of all legs. `now` (since the epoch): the newest leg goes on until then; None: it has ended."""
        if not self.num_legs:
            return 0.0
        end = self._leg_ended_at if now is None else now
        return self._earlier_s + max(0.0, end - self._leg_started_at)
