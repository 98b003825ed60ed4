"""The witness: a locked file that decides between two halves of a run's hosts."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from parallel3d.errors import LaunchError


class Witness:
    """A lock on a file that all hosts see. The serving coordinator holds it for as long as its process lives."""

    def __init__(self, path: str | None):
        self._path = Path(path) if path is not None else None
        self._file: IO[str] | None = None

    def try_lock(self) -> str:
        """Tries to lock the file; returns "" if this process holds the lock, else the reason why not."""
        if self._path is None:
            return "no witness is configured (elastic.witness)"
        try:
            self._file = self._file or self._path.open("a")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"the witness {self._path} is held by another side"
        except OSError as error:
            return f"the witness {self._path} can't be locked ({error.strerror})"
        return ""

    def lock_at_start(self) -> None:
        """Locks the file for the coordinator that begins a run; raises LaunchError if that fails."""
        if self._path is not None and (missing := self.try_lock()):
            raise LaunchError(f"{missing}: set elastic.witness to a file of this run alone, where all hosts see it")
