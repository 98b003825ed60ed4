"""The process `parallel3d upload --follow` beside a run, which copies its checkpoints to `checkpoint.upload`."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from parallel3d.checkpoint.store_process import say
from parallel3d.child_process import command_line

GRACE_S = 10.0
"""How much longer this process waits than the other works."""


class UploadProcess:
    """Runs from `with` on, and after the run at most `end_wait_s` longer. It is a process group of its own, so that a
    stop of the run does not end it; without this process it ends by itself, as soon as it has sent what is there."""

    def __init__(self, run_folder: Path, arguments: Sequence[str], *, end_wait_s: float):
        since = ["--follow", str(time.time()), "--end-wait", str(end_wait_s)]
        self._command = command_line("upload", str(run_folder), *arguments, *since)
        self._end_wait_s = end_wait_s

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, start_new_session=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        deadline_s = time.monotonic() + self._end_wait_s + GRACE_S
        try:
            has_ended = self._end(deadline_s)
            if has_ended is None:  # it was killed: another one sends what is missing
                self.__enter__()
                has_ended = self._end(deadline_s)
            if not has_ended:
                say("checkpoint.upload: the process that uploads has not ended as it should; some may be missing there")
        except KeyboardInterrupt:
            say("checkpoint.upload: stopped; the next start of the run sends what is missing")
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
