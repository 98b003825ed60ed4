"""The cells of the signal matrix: each process of a run, stopped, stopped for a moment, or killed, in each phase.

A world of member_processes.py; rank 1 announces that it has come to the phase, and waits there for a moment. In the
phases of a recovery the last rank has been killed before.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.launch_runs import child_of
from tests.support.member_processes import start, start_on_hosts
from tests.support.struck_worlds import MOMENTS_S, START_S, StruckWorld

POINTS = {"start": ("report", 0), "step": ("step", 5), "idle": ("step", 10)}
"""idle: the last rank has been killed in step 5, and the one before it, a spare now, waits for the end."""
RECOVERY = ("report", "moves", "confirm", "commit")
CONTROL_S = 6.0
"""The stub's patience is less, and more than the longest moment."""
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
STUB_AND_COORDINATOR = "stub and coordinator"
"""The stub is stopped, and its coordinator, which only it could replace, killed."""
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
    if process == STUB_AND_COORDINATOR:
        return [
            SignalCell(hosts, process, host, what, phase)
            for what, phase in itertools.product(("STOP", "CONT 0.3"), ("step", "confirm"))
        ]
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
    if cell.process == STUB_AND_COORDINATOR and is_lost:
        codes[cell.host] = 4
    if cell.process == "guardian" and is_lost and cell.hosts == 1:
        codes = [3]  # it had all workers
    return codes


def run_signal_cell(cell: SignalCell, directory: Path) -> str:
    """Runs a cell; returns what is wrong with its end, "" if nothing is."""
    directory.mkdir()
    world = StruckWorld(_start(cell, directory), directory)
    num_ranks = cell.hosts if cell.hosts > 1 else 4
    try:
        # a worker that has not connected yet would end otherwise
        world.await_files(["dawdling-1", *(f"pid-{rank}" for rank in range(num_ranks))])
        pid = _pid_of(cell, world)
        if cell.process == STUB_AND_COORDINATOR:
            coordinator = child_of(pid, "coordinator")
            os.kill(pid, signal.SIGSTOP)
            os.kill(coordinator, signal.SIGKILL)
        world.strike(pid, cell.what)
        outputs = world.end(pid if pid in _stubs(world) and cell.what == "STOP" else None)
        wrong = _wrong(cell, world, outputs)
    except AssertionError as error:
        return f"{cell.name}: {error}"
    finally:
        world.kill()
    return "\n".join([f"{cell.name}: {wrong[0]}", *wrong[1:], *outputs]) if wrong else ""


def _wrong(cell: SignalCell, world: StruckWorld, outputs: list[str]) -> list[str]:
    codes = [stub.returncode for stub in world.processes]
    return [
        *([f"exit codes {codes}, not {expected_codes(cell)}"] if codes != expected_codes(cell) else []),
        *(text for text in outputs if "Traceback" in text),
        *(log for log in world.logs() if "Traceback" in log and not any(end in log for end in AS_IT_ENDS)),
        *([f"left behind: {left}"] if (left := world.left_behind()) else []),
    ]


def _stubs(world: StruckWorld) -> list[int]:
    return [stub.pid for stub in world.processes]


def _start(cell: SignalCell, directory: Path) -> list[subprocess.Popen[str]]:
    last = 3 if cell.hosts == 1 else cell.hosts - 1
    point, number = POINTS.get(cell.phase, (cell.phase, 1))
    has_loss = cell.phase in (*RECOVERY, "idle")
    faults = [[1, point, number, "dawdle"], *([[last, "step", 5, "kill"]] if has_loss else [])]
    if cell.hosts > 1:
        return start_on_hosts(directory, list("abc"[: cell.hosts]), faults=faults, **SPEC)
    layout = (1, 2, 2) if cell.phase == "idle" else (2, 2, 1)
    return [start(directory, faults=faults, layout=layout, **SPEC)]


def _pid_of(cell: SignalCell, world: StruckWorld) -> int:
    stub = _stubs(world)[cell.host]
    if cell.process in ("stub", STUB_AND_COORDINATOR):
        return stub
    if cell.process == "coordinator" or cell.process == "guardian":
        return child_of(stub, cell.process)
    rank = cell.host if cell.hosts > 1 else 2 if cell.phase == "idle" else 1
    world.await_files([f"pid-{rank}"])
    return int((world.directory / f"pid-{rank}").read_text().split()[0])
