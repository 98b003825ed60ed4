"""Standard output and error of a run, which outlives whatever reads them.

A log collector dies, `| head` has seen enough, a terminal is closed, the disk under a redirected log is full: none of
it may cost a record or a process of the run. What can't be written is dropped.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

GONE = (errno.EPIPE, errno.EIO)
"""Of a pipe without a reader and of a terminal that was closed: nothing will ever be read again."""


class LastingStream(io.TextIOBase):
    """`stream`, but no write fails. `on_gone` is called once, when it has lost its reader for good."""

    def __init__(self, stream: TextIO, on_gone: Callable[[], object] = lambda: None):
        self._stream = stream
        self._on_gone = on_gone
        self._is_gone = False

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def _drop(self, error: OSError) -> None:
        """Sends what comes, and what the stream still holds, to nowhere if it has lost its reader."""
        if self._is_gone or error.errno not in GONE:
            return
        self._is_gone = True
        with suppress(OSError), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), self._stream.fileno())
        self._on_gone()


@contextmanager
def lasting_output(directory: Path) -> Iterator[None]:
    """Standard output and error of the run in `directory` never fail, in this process and in those that it forks.

    When standard output loses its reader, standard error says so.
    """
    out, err = sys.stdout, sys.stderr
    note = f"standard output has lost its reader: the run goes on, and its records are in {directory}"
    lasting_err = LastingStream(err)
    sys.stderr = lasting_err
    sys.stdout = LastingStream(out, on_gone=lambda: print(note, file=lasting_err, flush=True))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
