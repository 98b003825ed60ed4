"""The cells of the signal matrix: each process of a run, stopped, stopped for a moment, or killed, in each phase.

A world of member_processes.py; rank 1 announces that it has come to the phase, and waits there for a moment. In the
phases of a recovery the last rank has been killed before.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.launch_runs import child_of
from tests.support.member_processes import start, start_on_hosts
from tests.support.processes import DEADLINE_S, wait_for

POINTS = {"start": ("report", 0), "step": ("step", 5)}
RECOVERY = ("report", "moves", "confirm", "commit")
CONTROL_S = 6.0
"""The stub's patience is less, and more than the longest moment."""
MOMENTS_S = {"STOP": None, "CONT 0.3": 0.3, "CONT 3": 3.0, "KILL": None}
START_S = 120.0
"""Until the run has come to its phase. Six worlds start at once: some 10 s on two idle cores."""
END_S = 120.0
"""Until the run has ended; it takes some 8 s, and patience, on machines that are not busy."""
SPEC = {
    "num_steps": 120,
    "step_s": 0.05,
    "zero_stage": 0,
    "start_s": START_S,
    "connect_s": START_S,
    "control_s": CONTROL_S,
    "failover_s": 5.0,
    "heartbeat_s": 1.0,  # four times as long for one that is not stopped
    "watchdog_s": 10.0,
}
AS_IT_ENDS = ("GenerationEnded", "RunEnded", "is no longer part of the run")
"""How a member leaves a run that is over, or that it was evicted from (it may be killed while it says so)."""


@dataclass(frozen=True)
class SignalCell:
    """One run: what happens to which process of which host, when."""

    hosts: int
    process: str
    host: int
    what: str
    phase: str

    @property
    def name(self) -> str:
        return f"{self.hosts}-{self.process}-{self.host}-{self.what}-{self.phase}".replace(" ", "-")


def signal_cells(hosts: int, process: str, host: int) -> list[SignalCell]:
    """All cells of a process; on several hosts a sample of the phases."""
    phases = (*POINTS, *RECOVERY) if hosts == 1 else ("start", "step", "confirm")
    kinds = MOMENTS_S if hosts == 1 else ("STOP", "CONT 3", "KILL")
    return [SignalCell(hosts, process, host, what, phase) for what, phase in itertools.product(kinds, phases)]


def expected_codes(cell: SignalCell) -> list[int]:
    """The exit code of each stub."""
    is_lost = cell.what in ("STOP", "KILL")
    codes = [0] * cell.hosts
    if cell.process == "stub" and cell.what == "KILL":
        if cell.host == 0 and cell.phase == "start":
            codes = [4] * cell.hosts  # nothing is agreed yet that another coordinator could go on from
        codes[cell.host] = -signal.SIGKILL
    if cell.process == "coordinator" and is_lost and cell.phase == "start":
        codes = [4] * cell.hosts
    if cell.process == "guardian" and is_lost and cell.hosts == 1:
        codes = [3]  # it had all workers
    return codes


def run_signal_cell(cell: SignalCell, directory: Path) -> str:
    """Runs a cell; returns what is wrong with its end, "" if nothing is."""
    directory.mkdir()
    stubs = _start(cell, directory)
    try:
        _await_phase(cell, stubs, directory)
        pid = _pid_of(cell, stubs, directory)
        _strike(cell, pid, directory)
        outputs = _read(cell, stubs, pid)
    finally:
        for stub in stubs:
            if stub.poll() is None:
                os.killpg(stub.pid, signal.SIGKILL)
    codes = [stub.returncode for stub in stubs]
    logs = [log.read_text() for log in (directory / "logs").glob("*.log")]
    wrong = [
        *([f"exit codes {codes}, not {expected_codes(cell)}"] if codes != expected_codes(cell) else []),
        *(text for text in outputs if "Traceback" in text),
        *(log for log in logs if "Traceback" in log and not any(end in log for end in AS_IT_ENDS)),
        *([f"left behind: {left}"] if (left := _left_behind(directory)) else []),
    ]
    return "\n".join([f"{cell.name}: {wrong[0]}", *wrong[1:], *outputs]) if wrong else ""


def _start(cell: SignalCell, directory: Path) -> list[subprocess.Popen[str]]:
    last = 3 if cell.hosts == 1 else cell.hosts - 1
    point, number = POINTS.get(cell.phase, (cell.phase, 1))
    faults = [[1, point, number, "dawdle"], *([[last, "step", 5, "kill"]] if cell.phase in RECOVERY else [])]
    if cell.hosts == 1:
        return [start(directory, faults=faults, **SPEC)]
    return start_on_hosts(directory, list("abc"[: cell.hosts]), faults=faults, **SPEC)


def _await_phase(cell: SignalCell, stubs: list[subprocess.Popen[str]], directory: Path) -> None:
    """Waits until the run has come to its phase and all workers have connected; one that has not ends otherwise."""
    num_ranks = len(stubs) if cell.hosts > 1 else 4
    files = [directory / "dawdling-1", *(directory / f"pid-{rank}" for rank in range(num_ranks))]
    deadline = time.monotonic() + START_S
    while missing := [file.name for file in files if not file.exists()]:
        if time.monotonic() > deadline or all(stub.poll() is not None for stub in stubs):
            raise AssertionError(f"{cell.name}: {missing} never came\n{_end(stubs, directory)}")
        time.sleep(0.01)


def _end(stubs: list[subprocess.Popen[str]], directory: Path) -> str:
    """Kills the stubs that still run; returns what all processes of the world have said."""
    said = []
    for stub in stubs:
        state = "ended" if stub.poll() is not None else "ran"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(stub.pid, signal.SIGKILL)
        out, err = stub.communicate(timeout=DEADLINE_S)
        said.append(f"--- a stub that {state} ({stub.returncode})\n{out}{err}")
    logs = sorted((directory / "logs").glob("*.log"))
    return "\n".join([*said, *(f"--- {log.name}\n{log.read_text()}" for log in logs)])


def _pid_of(cell: SignalCell, stubs: list[subprocess.Popen[str]], directory: Path) -> int:
    stub = stubs[cell.host].pid
    if cell.process == "stub":
        return stub
    if cell.process == "worker":
        file = directory / f"pid-{1 if cell.hosts == 1 else cell.host}"
        wait_for(lambda: file.exists() and file.read_text(), f"{cell.name}: the worker")
        return int(file.read_text().split()[0])
    return child_of(stub, cell.process)


def _strike(cell: SignalCell, pid: int, directory: Path) -> None:
    os.kill(pid, signal.SIGKILL if cell.what == "KILL" else signal.SIGSTOP)
    (directory / "struck").touch()
    if moment_s := MOMENTS_S[cell.what]:
        time.sleep(moment_s)
        with contextlib.suppress(ProcessLookupError):  # a worker has been killed meanwhile
            os.kill(pid, signal.SIGCONT)


def _read(cell: SignalCell, stubs: list[subprocess.Popen[str]], pid: int) -> list[str]:
    """Waits for all stubs. One that was stopped is continued once nothing but its end is missing."""
    deadline = time.monotonic() + END_S
    if cell.process == "stub" and cell.what == "STOP":
        others = [stub for stub in stubs if stub.pid != pid]
        while time.monotonic() < deadline and not (
            _are_workers_gone(pid) and all(stub.poll() is not None for stub in others)
        ):
            time.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
    outputs = []
    for stub in stubs:
        out, err = stub.communicate(timeout=max(1.0, deadline - time.monotonic()))
        outputs.append(out + err)
    return outputs


def _are_workers_gone(stub: int) -> bool:
    children = Path(f"/proc/{stub}/task/{stub}/children").read_text().split()
    return not any(Path(f"/proc/{child}/task/{child}/children").read_text().split() for child in children)


def _left_behind(directory: Path) -> list[str]:
    """Processes of the world that are still there after a moment."""
    deadline = time.monotonic() + 10
    while (left := _processes_of(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _processes_of(directory: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{directory}\0" in (path / "cmdline").read_text():
                found.append(f"{path.name} {(path / 'comm').read_text().strip()}")
        except OSError:
            continue
    return found
