"""The processes `parallel3d track` beside a run, one for each of `monitor.trackers`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from parallel3d.child_process import command_line
from parallel3d.errors import UserError
from parallel3d.monitor.trackers import TRACKERS, find_tracker

END_WAIT_S = 60.0
"""Longest wait for trackers to send the rest, once the run has ended."""
CHECK_WAIT_S = 300.0
"""Longest wait for a tracker of the user's own to be loaded, which may import much."""


def check_tracker(name: str) -> None:
    """Raises UserError for a tracker that can't be used. Code of the user's is loaded by a process of its own: this one
    will fork."""
    if name in TRACKERS:
        find_tracker(name)
        return
    command = command_line("track", ".", "--check", "--to", name)
    nothing = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, text=True, timeout=CHECK_WAIT_S
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"monitor.trackers: {name} was not loaded within {CHECK_WAIT_S:g} s") from None
    if done.returncode:
        why = done.stderr.strip() or f"can't be loaded (exit code {done.returncode})"
        raise UserError(f"monitor.trackers: {name}: {why}" if name not in why else why)


class TrackerProcesses:
    """Runs from `with` on. They are process groups of their own, so that Ctrl-C ends them after the run."""

    def __init__(
        self, trackers: Sequence[str], folder: Path, *, project: str, name: str, end_wait_s: float = END_WAIT_S
    ):
        self._trackers, self._end_wait_s = trackers, end_wait_s
        self._arguments = [str(folder), "--project", project, "--name", name, "--since", str(time.time())]

    def __enter__(self) -> Self:
        self._processes = {
            tracker: subprocess.Popen(
                command_line("track", *self._arguments, "--to", tracker),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            for tracker in self._trackers
        }
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        deadline_s = time.monotonic() + (self._end_wait_s if kind is None else 0.0)
        for tracker, process in self._processes.items():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                if kind is None:
                    text = f"has not taken the rest within {self._end_wait_s:g} s, and was ended"
                    print(f"monitor.trackers: {tracker} {text}", file=sys.stderr, flush=True)
