"""The command `parallel3d train` as a child process of a Python program, with its output on the program's streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Self, TextIO

from parallel3d.child_process import command_line

CALLER_VARIABLE = "PARALLEL3D_CALLER"
"""Set to the caller's process ID: the command ends with that process, and `train` refuses to be called below it."""
KEPT_LINES = 200
READER_WAIT_S = 10.0
"""Longest wait for the rest of the output, once the command has ended: a process that it left may hold the pipe."""


class TrainProcess:
    """Runs from `with` on; leaving the block in any way ends it.

    It is a process group of its own: Ctrl-C reaches the caller, which passes it on once.
    """

    def __init__(self, arguments: Sequence[str], *, quiet: bool):
        self._arguments = arguments
        self._quiet = quiet
        self.errors: deque[str] = deque(maxlen=KEPT_LINES)
        """The last lines of its standard error."""

    def __enter__(self) -> Self:
        on_terminal = not self._quiet and sys.stdout is sys.__stdout__ and os.isatty(1)  # for a progress bar
        self._process = subprocess.Popen(
            command_line("train", *self._arguments),
            stdin=subprocess.DEVNULL,
            stdout=None if on_terminal else subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
        )
        pumps = [(self._process.stdout, sys.stdout, None), (self._process.stderr, sys.stderr, self.errors)]
        self._readers = [
            threading.Thread(target=_pump, args=(pipe, None if self._quiet else stream, kept), daemon=True)
            for pipe, stream, kept in pumps
            if pipe is not None
        ]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None and self._process.poll() is None:
            self.stop()
        try:
            self._process.wait()  # bounded: the command has ended, or was asked to
        except KeyboardInterrupt:  # a second one
            os.killpg(self._process.pid, signal.SIGKILL)
            raise
        finally:
            for reader in self._readers:
                reader.join(READER_WAIT_S)

    def wait(self, seconds: float) -> bool:
        """Whether the command has ended, after at most `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """Asks the run to end, as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    @property
    def exit_code(self) -> int:
        """The command's, once it has ended; 128 + n if signal n has killed it."""
        code = self._process.returncode
        return 128 - code if code < 0 else code


def _environment() -> dict[str, str]:
    """The caller's, from which the command can import all that the caller can."""
    folders = [path for path in sys.path if path and os.path.isdir(path) and "-packages" not in path]
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys([*filter(None, known), *folders[:1]])  # a script's folder comes first
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        CALLER_VARIABLE: str(os.getpid()),
    }


def _pump(pipe: IO[bytes], stream: TextIO | None, kept: deque[str] | None) -> None:
    """Copies lines to a stream of the caller's, which may be a notebook's."""
    for data in pipe:
        line = data.decode(errors="replace")
        if kept is not None:
            kept.append(line)
        if stream is not None:
            try:
                stream.write(line)
                stream.flush()
            except (OSError, ValueError):  # a stream that was closed ends no run
                stream = None
