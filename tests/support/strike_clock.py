"""How long after a strike a run went on, or had ended.

Times are those of time.monotonic, one clock for all processes of a machine. Workers write each step that they have made
(processes.py); the ends of processes are watched from the strike on. So what a launcher takes to start its processes,
or to notice that they have ended, counts nowhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.struck_worlds import StruckWorld, parent_of

FILE = "strike.json"
POLL_MS = 100
"""Between looks at whether a watch is over; an end is seen at once."""
LAST_END_S = 10.0
"""How long a watch waits for ends once its run is over."""


@dataclass(frozen=True)
class Step:
    """One step that a worker has made, and in which generation."""

    generation: int
    step: int
    made_s: float


@dataclass(frozen=True)
class Strike:
    """What was struck when, and when which of the run's processes of that time have ended."""

    struck_s: float
    below: list[int]
    """The struck process, and all below it."""
    children: list[int]
    """Those of them right below it."""
    started: list[int]
    """Those of the run's processes that its test has started."""
    ended_s: dict[int, float | None]
    """All of the run's processes."""


class StrikeClock:
    """Begins with the strike of the process `pid`."""

    def __init__(self, world: StruckWorld, pid: int):
        pids = world.pids()
        parents = _parents(pids)
        self._below, self._children = _below(pid, parents), [child for child in parents if parents[child] == pid]
        self._started = [process.pid for process in world.processes]
        self._ended_s: dict[int, float | None] = dict.fromkeys(pids)
        self._until_s = float("inf")
        self._thread = threading.Thread(target=self._watch, args=(_open(pids),), daemon=True)
        self._thread.start()
        self._struck_s = time.monotonic()

    def write(self, directory: Path) -> None:
        """Ends the watch, and writes the strike into a file. A process whose memory the kernel still frees has no name
        any more by which a run could find it, and has not ended yet."""
        self._until_s = time.monotonic() + LAST_END_S
        self._thread.join()
        strike = Strike(self._struck_s, self._below, self._children, self._started, self._ended_s)
        (directory / FILE).write_text(json.dumps(asdict(strike)))

    def _watch(self, ends: dict[int, int]) -> None:
        poll = select.poll()
        for end in ends:
            poll.register(end, select.POLLIN)
        while ends and time.monotonic() < self._until_s:
            for end, _ in poll.poll(POLL_MS):
                self._ended_s[ends.pop(end)] = time.monotonic()
                poll.unregister(end)
                os.close(end)
        for end in ends:
            os.close(end)


def read_strike(directory: Path) -> Strike | None:
    """The strike of a run that has ended; None if it did not come to that."""
    if not (directory / FILE).exists():
        return None
    read = json.loads((directory / FILE).read_text())
    return Strike(**{**read, "ended_s": {int(pid): ended_s for pid, ended_s in read["ended_s"].items()}})


def read_steps(directory: Path) -> list[Step]:
    """The steps that all workers of a run have made."""
    lines = [line for file in directory.glob("steps-*") for line in file.read_text().splitlines(keepends=True)]
    words = [line.split() for line in lines if line.endswith("\n")]  # a worker may be killed while it writes
    return [Step(int(generation), int(step), float(made_s)) for generation, step, made_s in words]


def settled_s(
    strike: Strike, steps: Iterable[Step], *, last_step: int, newer_than: int, must_end: bool, stays: Collection[int]
) -> float | None:
    """Seconds from the strike until the run went on: it has made a step in a generation after `newer_than`, and, if
    `must_end`, the struck process and those below it have ended. A run that never came to `last_step` has ended
    instead: until all of its processes had. `stays`: they end later, for reasons of the test. None: it never did."""
    steps = list(steps)
    until: list[float | None] = []
    if any(step.step == last_step for step in steps):
        made = [s.made_s for s in steps if s.made_s > strike.struck_s and s.generation > newer_than]
        ends = [strike.ended_s.get(pid) for pid in strike.below if must_end and pid not in stays]
        until = [min(made, default=None), *ends]
    else:
        until = [ended_s for pid, ended_s in strike.ended_s.items() if pid not in stays]
    known = [each for each in until if each is not None]
    return max(known) - strike.struck_s if known and len(known) == len(until) else None


def _open(pids: Iterable[int]) -> dict[int, int]:
    """A descriptor of each process that is still there."""
    found = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found[os.pidfd_open(pid)] = pid
    return found


def _parents(pids: Iterable[int]) -> dict[int, int]:
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[pid] = parent_of(pid)
    return found


def _below(top: int, parents: dict[int, int]) -> list[int]:
    """`top`, and those of the processes that are below it."""
    found = [top]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found
