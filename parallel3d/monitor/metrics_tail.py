"""Follows a metrics.jsonl that another process writes: each line once, in order.

The file may be replaced, when a restart moves lost steps out of it. Then it is read again from its start, and what was
delivered before is left out: events are never removed but evaluations, so they can be counted, and steps have numbers.
A coordinator that takes over drops half a line, which was not delivered yet.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class GrowingFile:
    """Reads what is added to a file of lines, which may be replaced."""

    def __init__(self, path: Path):
        self._path = path
        self._file_id = (0, 0)
        self._offset = 0

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether it is another file than before, and its whole lines since; none before the file exists."""
        is_other = False
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                file_id = (status.st_dev, status.st_ino)
                if file_id != self._file_id or status.st_size < self._offset:
                    self._file_id, self._offset, is_other = file_id, 0, True
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return is_other, []
        whole = data[: data.rfind(b"\n") + 1]  # a line that is being written comes next time
        self._offset += len(whole)
        return is_other, [line for line in whole.split(b"\n") if line]


class MetricsTail:
    """The lines of the start of the run that begins at `since_s` (seconds since 1970) or later; not its history."""

    def __init__(self, path: Path, *, since_s: float):
        self._path, self._file = path, GrowingFile(path)
        self._since_s = since_s
        self._has_begun = False
        """The event `started` of this start has been read."""
        self._events_read = self._events_delivered = 0
        """Events other than evaluations since that one, of the current file; and in total."""
        self._last_step = self._last_evaluation = -1

    def new_lines(self) -> list[Line]:
        """The lines that were not delivered yet; none before the file exists."""
        is_other, found = self._file.read()
        if is_other:
            self._events_read, self._has_begun = 0, False
        lines = (json.loads(line) for line in found)
        return [line for line in lines if self._is_new(line)]

    def history(self) -> list[Line]:
        """The lines before this start, which a resumed run has kept."""
        _, found = GrowingFile(self._path).read()
        return list(itertools.takewhile(lambda line: not self._begins(line), map(json.loads, found)))

    def _begins(self, line: Line) -> bool:
        return bool(line.get("event") == "started" and line["time"] >= self._since_s)

    def _is_new(self, line: Line) -> bool:
        event, step = line.get("event"), line.get("step", -1)
        self._has_begun = self._has_begun or self._begins(line)
        if not self._has_begun:
            return False
        if event in (None, "evaluation"):
            last = self._last_step if event is None else self._last_evaluation
            if self._events_read < self._events_delivered or step <= last:
                return False
            if event is None:
                self._last_step = step
            else:
                self._last_evaluation = step
            return True
        self._events_read += 1
        if self._events_read <= self._events_delivered:
            return False
        self._events_delivered = self._events_read
        if event == "restart":  # later steps are lost, and come again
            self._last_step = min(self._last_step, step)
            self._last_evaluation = min(self._last_evaluation, step)
        return True
