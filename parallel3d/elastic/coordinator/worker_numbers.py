"""Numbers for workers that come during a run. None is given twice, whichever coordinator gives it.

A successor learns of the workers of the last generation, and of those that have said hello. A worker that was asked to
come, and had not, is known to its guardian alone, or to the command that starts it: hence the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

FILE = ".next_worker"


class WorkerNumbers:
    """Keeps the next number in a run's folder; without one for itself."""

    def __init__(self, directory: Path | None = None):
        self._file = directory / FILE if directory else None
        self._next = 0

    def take(self, known: Iterable[int]) -> int:
        """Returns a number above all `known` and all that were given before."""
        number = max(self._next, *(rank + 1 for rank in known))
        self._next = number + 1
        if self._file:
            new = self._file.with_suffix(".new")
            with contextlib.suppress(OSError):  # on a full disk a successor may give it again
                new.write_text(str(self._next))
                new.replace(self._file)
        return number

    def resume(self) -> None:
        """Goes on where the coordinator before this one was lost."""
        if self._file:
            with contextlib.suppress(OSError, ValueError):
                self._next = max(self._next, int(self._file.read_text()))

    def forget(self) -> None:
        """Begins again, for a start of the run, or at its end."""
        self._next = 0
        if self._file:
            self._file.unlink(missing_ok=True)
