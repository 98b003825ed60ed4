"""A run in processes, one of which is stopped, stopped for a moment, or killed; what is left when it has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import DEADLINE_S

ROOT = Path(__file__).parents[2]
MOMENTS_S = {"STOP": None, "CONT 0.3": 0.3, "CONT 3": 3.0, "KILL": None}
"""How long a process is stopped; None: for good."""
START_S = 120.0
"""Until the run has come to its phase. Six worlds start at once: some 10 s on two idle cores."""
END_S = 120.0
"""Until the run has ended; it takes some 8 s, and patience, on machines that are not busy."""
_STARTS = threading.Lock()
"""One run starts at a time: the imports of its interpreters take all cores, on which others' seconds are measured."""


@dataclass(frozen=True)
class StruckWorld:
    """`processes` are those that were started, each in a session of its own; all others name `directory`, too."""

    processes: Sequence[subprocess.Popen[str]]
    directory: Path

    def await_files(self, names: Sequence[str]) -> None:
        """Waits until the run has made these files."""
        self.await_condition(lambda: all((self.directory / name).exists() for name in names), f"{names}")

    def await_condition(self, is_met: Callable[[], object], what: str) -> None:
        """Waits for something; fails, with all that the run has said, once that can't come any more."""
        deadline = time.monotonic() + START_S
        while not is_met():
            if time.monotonic() > deadline or all(process.poll() is not None for process in self.processes):
                raise AssertionError(f"{what} never came\n{self._last_words()}")
            time.sleep(0.02)

    def strike(self, pid: int, what: str) -> None:
        """Sends the signal, lets the run go on from its phase, and ends the moment."""
        os.kill(pid, signal.SIGKILL if what == "KILL" else signal.SIGSTOP)
        (self.directory / "struck").touch()
        if moment_s := MOMENTS_S[what]:
            time.sleep(moment_s)
            with contextlib.suppress(ProcessLookupError):  # a worker has been killed meanwhile
                os.kill(pid, signal.SIGCONT)

    def await_end_below(self) -> None:
        """Waits until nothing of the run is left but the processes that were started."""
        deadline = time.monotonic() + END_S
        while left := self.pids().keys() - {process.pid for process in self.processes}:
            if time.monotonic() > deadline:
                raise AssertionError(f"{left} still running\n{self._last_words()}")
            time.sleep(0.1)

    def kill_started(self, once_ended: int) -> None:
        """Kills the processes that were started once that one of them has ended."""
        self.processes[once_ended].wait(END_S)
        for process in self.processes:
            process.kill()

    def end(self, stopped: int | None) -> list[str]:
        """Waits for all processes; returns their outputs. `stopped`, one of them or a stub below a launcher, is
        continued once nothing but its end is missing."""
        deadline = time.monotonic() + END_S
        if stopped is not None:
            others = [process for process in self.processes if process.pid != stopped]
            is_below = len(others) == len(self.processes)
            while time.monotonic() < deadline and not (
                are_workers_gone(stopped) and (is_below or all(process.poll() is not None for process in others))
            ):
                time.sleep(0.1)
            os.kill(stopped, signal.SIGCONT)
        outputs = []
        for process in self.processes:
            try:
                out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running\n{self._last_words()}") from None
            outputs.append(out + (err or ""))
        return outputs

    def logs(self) -> list[str]:
        """The workers' logs."""
        return [log.read_text() for log in sorted(self.directory.glob("**/logs/*.log"))]

    def left_behind(self) -> list[str]:
        """Processes of the run that are still there after a moment."""
        deadline = time.monotonic() + 60
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [f"{pid} {name}" for pid, name in left.items()]

    def pids(self) -> dict[int, str]:
        """The names of all processes of the run, which are below the started ones or were."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{self.directory}\0" in (path / "cmdline").read_text():
                    found[int(path.name)] = (path / "comm").read_text().strip()
        return found

    def kill(self) -> None:
        """Kills what still runs."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _last_words(self) -> str:
        ended = [process.poll() is not None for process in self.processes]
        self.kill()
        said = []
        for process, has_ended in zip(self.processes, ended):
            out, err = process.communicate(timeout=DEADLINE_S)
            said.append(f"--- {'ended with ' + str(process.returncode) if has_ended else 'ran'}\n{out}{err or ''}")
        return "\n".join([*said, *(f"--- a log\n{log}" for log in self.logs())])


@contextlib.contextmanager
def started_world(
    start: Callable[[], Sequence[subprocess.Popen[str]]], directory: Path, awaited: Sequence[str]
) -> Iterator[StruckWorld]:
    """A run in `directory` that has made the files it was waited for; what is left of it is killed."""
    with contextlib.ExitStack() as stack:
        with _STARTS:
            world = StruckWorld(start(), directory)
            stack.callback(world.kill)
            world.await_files(awaited)
        yield world


def are_workers_gone(stub: int) -> bool:
    """Whether no child of a stub has a child."""
    children = Path(f"/proc/{stub}/task/{stub}/children").read_text().split()
    return not any(Path(f"/proc/{child}/task/{child}/children").read_text().split() for child in children)


def has_own_traceback(text: str) -> bool:
    """Whether there is a traceback through a file of the project. torchrun writes some of its own, of a child's exit
    code or of a store that is gone."""
    return "Traceback" in text and any(f'File "{ROOT / top}/' in text for top in ("parallel3d", "launch", "tests"))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
