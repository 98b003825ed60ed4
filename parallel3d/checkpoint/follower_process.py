"""A process that follows a run beside it, and what it still does once the run has ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from parallel3d.checkpoint.store_process import say

GRACE_S = 10.0
"""How much longer this process waits than the other works."""


@dataclass(frozen=True, kw_only=True)
class FollowerTexts:
    """The field that has started a follower, and the consequence if it does not end, or is stopped."""

    field: str
    not_ended: str
    stopped: str


class FollowerProcess:
    """Runs `command` from `with` on, and after the run at most `end_wait_s` longer. It is a process group of its own,
    so that a stop of the run does not end it; without this process it ends by itself.

    It reads the end of its standard input as the end of the run, and prints a line as it ends.
    """

    def __init__(self, command: Sequence[str], texts: FollowerTexts, *, end_wait_s: float):
        self._command, self._texts, self._end_wait_s = list(command), texts, end_wait_s

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, start_new_session=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        deadline_s = time.monotonic() + self._end_wait_s + GRACE_S
        try:
            has_ended = self._end(deadline_s)
            if has_ended is None:  # it was killed: another one does the rest
                self.__enter__()
                has_ended = self._end(deadline_s)
            if not has_ended:
                say(f"{self._texts.field}: {self._texts.not_ended}")
        except KeyboardInterrupt:
            say(f"{self._texts.field}: stopped; {self._texts.stopped}")
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()  # bounded: it was killed

    def _end(self, deadline_s: float) -> bool | None:
        """Announces the end of the run; returns whether the process has said that it ends, None if it died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError), self._process.stdout as output:
            self._process.stdin.close()
            while (wait_s := deadline_s - time.monotonic()) > 0:
                if select.select([output], [], [], wait_s)[0]:
                    return True if output.read1(1) else None  # type: ignore[attr-defined]
        return False
