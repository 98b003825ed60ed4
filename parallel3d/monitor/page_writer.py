"""Writes the page of a run (report.html): at its end in this process, and while it goes on in a child process.

The child, one at a time and with the lowest priority, takes no time that training waits for. Whatever goes wrong with
the page, the run goes on, and ends as it would without it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from parallel3d.child_process import command_line
from parallel3d.monitor.run_folder import PAGE

NICENESS = 19
AFTER_CHECKPOINT_S = 60.0
"""After a checkpoint the next page comes as early as this after the one before, so that frequent saves cost little."""
END_WAIT_S = 2.0
"""Longest wait for a child when the run has ended; its page is replaced anyway."""


class PageWriter:
    """`write` makes the page of a run folder; `every_s` is the time between two children, None: no children."""

    def __init__(
        self,
        folder: Path,
        write: Callable[[Path], object],
        *,
        every_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._folder, self._write, self._every_s, self._clock = folder, write, every_s, clock
        self._child: subprocess.Popen[bytes] | None = None
        self._begun_s = clock()
        self._has_new_checkpoint = False

    def on_checkpoint(self) -> None:
        """Makes the next page due after `AFTER_CHECKPOINT_S` instead of `every_s`."""
        self._has_new_checkpoint = True

    def on_step(self) -> None:
        """Starts a child if it is time, and the one before has ended; never waits."""
        if self._every_s is None:
            return
        wait_s = min(self._every_s, AFTER_CHECKPOINT_S) if self._has_new_checkpoint else self._every_s
        if self._clock() - self._begun_s < wait_s:
            return
        if self._child is not None and self._child.poll() is None:
            return
        self._begun_s, self._has_new_checkpoint = self._clock(), False
        null = subprocess.DEVNULL
        command = ["nice", "-n", str(NICENESS), *command_line("report", str(self._folder), "--html")]
        with suppress(OSError):  # without processes or memory: the next one may work
            self._child = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)

    def finish(self) -> str:
        """Writes the page of the finished run; returns why it could not be written, or nothing."""
        try:
            self._end_child()
            self._write(self._folder)
        except Exception as error:  # a page is not worth a run
            return f"can't write {PAGE} ({type(error).__name__}: {error})"
        return ""

    def _end_child(self) -> None:
        if self._child is None:
            return
        try:
            self._child.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()  # bounded: it was killed
            with suppress(OSError):
                os.unlink(self._folder / f".{PAGE}.{self._child.pid}")  # `nice` has become the command
