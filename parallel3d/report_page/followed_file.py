"""Follows a file of JSON lines that another process writes, from its first line on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class FollowedFile:
    """The new lines since the last look; a file that was replaced begins again.

    `MetricsTail` of the monitors hands each line over once, even of a file that was replaced; this one shows the file.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file_id = (0, 0)
        self._offset = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """New lines, and whether they are those of a new file; none before the file exists."""
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                is_new = (status.st_dev, status.st_ino) != self._file_id or status.st_size < self._offset
                if is_new:
                    self._file_id, self._offset = (status.st_dev, status.st_ino), 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return [], False
        whole = data[: data.rfind(b"\n") + 1]  # a line that is being written comes next time
        self._offset += len(whole)
        return [json.loads(line) for line in whole.split(b"\n") if line], is_new
