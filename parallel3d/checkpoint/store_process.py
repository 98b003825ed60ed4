"""Work on a remote store in a process of its own, which the run watches: `parallel3d upload` and `parallel3d fetch`.

A driver may block, start threads or crash without the run noticing. Such a process prints its events on its standard
output, a JSON object per line, also while bytes travel; one that is silent for too long is ended.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from parallel3d.child_process import command_line
from parallel3d.errors import CheckpointError

STALL_S = 120.0
"""Longest silence of a store."""
POLL_S = 0.5
BEAT_S = 1.0
PROBE_S = 60.0
EVENTS = "--events"


class EventPrinter:
    """Prints events for the process that watches this one, and sometimes that there is progress."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._beat_s = clock, 0.0

    def __call__(self, event: Mapping[str, Any]) -> None:
        print(json.dumps(event), flush=True)
        self._beat_s = self._clock()

    def beat(self) -> None:
        """Called for each piece of work."""
        if self._clock() - self._beat_s >= BEAT_S:
            self({"event": "alive"})

    def log(self, text: str) -> None:
        self({"event": "retry", "text": text})


class Stalled(CheckpointError):
    """A store was silent for too long."""


def run_watched(
    name: str,
    arguments: Sequence[str],
    on_event: Callable[[dict[str, Any]], None],
    *,
    stall_s: float = STALL_S,
    on_poll: Callable[[IO[bytes]], bool] = lambda stdin: True,
    keep_open: Sequence[int] = (),
) -> int:
    """Runs `parallel3d NAME ARGUMENTS --events` to its end; returns its exit code, negative for a signal.

    on_poll: called often, with the process's standard input; False ends the process. Raises Stalled.
    """
    command = command_line(name, *arguments, EVENTS)
    pipe = subprocess.PIPE
    quiet = subprocess.DEVNULL  # drivers and their tracebacks may quote credentials
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, pass_fds=keep_open)
    assert process.stdin is not None and process.stdout is not None
    heard_s, rest = time.monotonic(), b""
    try:
        while True:
            if not on_poll(process.stdin):
                raise Stalled("the time is over")
            ready, _, _ = select.select([process.stdout], [], [], POLL_S)
            if ready:
                data = process.stdout.read1(2**16)  # type: ignore[attr-defined]
                *lines, rest = (rest + data).split(b"\n")
                heard_s = time.monotonic()
                for line in lines:
                    on_event(json.loads(line))
                if not data:
                    return process.wait(timeout=stall_s)
            elif time.monotonic() - heard_s > stall_s:
                raise Stalled(f"nothing was heard from the store for {stall_s:g} s")
    except subprocess.TimeoutExpired:
        raise Stalled("the process that works on the store does not end") from None
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()  # bounded: it has ended, or was killed
        process.stdin.close()
        process.stdout.close()


def check_target(address: str) -> None:
    """Writes, reads and removes a small file at the address. Raises CheckpointError if it can't be written."""
    problems: list[str] = []

    def collect(event: Mapping[str, Any]) -> None:
        problems.extend([str(event["text"])] if event["event"] == "failed" else [])

    try:
        code = run_watched("upload", ["--probe", address], collect, stall_s=PROBE_S)
    except Stalled as error:
        problems, code = [str(error)], 1
    if code or problems:
        raise CheckpointError(problems[-1] if problems else f"the process that tries it ended with {code}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
