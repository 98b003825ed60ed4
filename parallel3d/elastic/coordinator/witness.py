"""The witness: a locked file that decides between two halves of a run's hosts.

The coordinator that serves holds the lock for as long as its process lives, and keeps the generation that it has
committed in the file. So the other half does not begin again once the first has gone on without it and ended.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from parallel3d.errors import LaunchError

OVER = 2**62
"""The mark of a run that has ended: later than any generation."""
_BEGINS = -1


class Witness:
    """A lock on a file that all hosts see."""

    def __init__(self, path: str | None):
        self._path = Path(path) if path is not None else None
        self._file: IO[str] | None = None
        self._has_lock = False
        self._mark: int | None = None

    def try_lock(self, generation: int = OVER) -> str:
        """Tries to lock the file for a side that goes on from `generation`.

        Returns "" if this process holds the lock and no other side has gone on from there, else the reason why not.
        """
        if self._path is None:
            return "no witness is configured (elastic.witness)"
        try:
            self._file = self._file or self._path.open("a+")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._has_lock = True
            mark = self._read()
        except BlockingIOError:
            return f"the witness {self._path} is held by another side"
        except OSError as error:
            return f"the witness {self._path} can't be locked ({error.strerror})"
        if mark > generation:
            gone_on = "ended there" if mark == OVER else f"gone on to generation {mark} there"
            return f"the witness {self._path} was held by another side, and the run has {gone_on}"
        return ""

    def lock_at_start(self) -> None:
        """Locks the file for the coordinator that begins a run; raises LaunchError if that fails."""
        if self._path is not None and (missing := self.try_lock()):
            raise LaunchError(f"{missing}: set elastic.witness to a file of this run alone, where all hosts see it")
        self.mark(_BEGINS)

    def mark(self, generation: int) -> None:
        """Writes the generation that this side has committed into the file, if it holds the lock."""
        if self._file is None or not self._has_lock or generation == self._mark:
            return
        self._mark = generation
        with suppress(OSError):  # a full disk: the lock alone decides, as long as this process lives
            self._file.truncate(0)
            self._file.write(f"{generation}\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read(self) -> int:
        """The mark in the file; a file without one is new."""
        assert self._file is not None
        self._file.seek(0)
        text = self._file.read().strip()
        return int(text) if text.lstrip("-").isdigit() else _BEGINS
