"""The cells of the signal matrix: each process of a run, stopped, stopped for a moment, or killed, in each phase.

A world of member_processes.py; rank 1 announces that it has come to the phase, and waits there for a moment. In the
phases of a recovery the last rank has been killed before. Above the stubs there is no launcher, or a torchrun for each
host.

`commit`: rank 1 has received it, while the others wait for rank 1 in the new generation's first exchange. Members have
no groups that could be made; real training has (training_cells.py).
"""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.support.launch_runs import child_of
from tests.support.member_processes import start, start_on_hosts, start_under_torchrun
from tests.support.strike_clock import StrikeClock
from tests.support.struck_worlds import MOMENTS_S, START_S, StruckWorld, has_own_traceback, parent_of, started_world

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
TORCHRUN_ENDS = {
    1: (
        ("launcher", 0, (("STOP", "start"), ("KILL", "start"), ("KILL", "confirm"))),
        ("stub", 0, (("CONT 3", "step"), ("STOP", "report"), ("KILL", "commit"))),
        ("guardian", 0, (("STOP", "step"), ("KILL", "moves"))),
        ("coordinator", 0, (("KILL", "start"), ("STOP", "idle"), ("KILL", "confirm"))),
        ("worker", 0, (("STOP", "commit"),)),
    ),
    3: (
        ("launcher", 0, (("STOP", "start"), ("KILL", "step"), ("CONT 3", "confirm"))),
        ("launcher", 1, (("KILL", "confirm"),)),
        ("guardian", 1, (("STOP", "start"),)),
        ("coordinator", 0, (("KILL", "confirm"),)),
    ),
}
"""Process, host, what happens to it in which phase: every process and every phase, not every pair. A launcher that is
stopped at the start stays so through all phases. It isn't killed there on one of several hosts: it depends on the
moment in which its stub notices that whether anything is agreed by then.
"""
RELAY_PROCESSES = ("launcher", "guardian", "coordinator", "worker", "relay")
SAYS_WHY = "the run's coordinator is gone|the run can't go on|the run has ended with exit code|was (lost|killed)"
"""What a host's terminal shows of a run that has failed."""


@dataclass(frozen=True)
class SignalCell:
    """One run: what happens to which process of which host, when. The process `launcher` is the host's torchrun."""

    hosts: int
    process: str
    host: int
    what: str
    phase: str
    has_torchrun: bool = False
    has_relays: bool = False
    """Two ranks a host, whose guardians share one connection."""

    @property
    def name(self) -> str:
        launcher = ("torchrun-" if self.has_torchrun else "") + ("relays-" if self.has_relays else "")
        return f"{launcher}{self.hosts}-{self.process}-{self.host}-{self.what}-{self.phase}".replace(" ", "-")

    @property
    def layout(self) -> tuple[int, int, int]:
        """With as few ranks as the phase needs below torchrun, where each imports torch."""
        if self.has_relays:
            return 1, 2 * self.hosts, 1
        if self.phase == "idle":
            return (1, 3, 2) if self.hosts > 1 else (1, 2, 2)
        if self.hosts > 1:
            return 1, self.hosts, 1
        if self.has_torchrun:
            return 1, 3 if self.phase in RECOVERY else 2, 1
        return 2, 2, 1

    @property
    def host_of_rank(self) -> list[int]:
        """The last of several hosts has the ranks that are left where it is not torchrun that deals them."""
        num_ranks = math.prod(self.layout)
        if self.has_torchrun or self.has_relays:
            return [rank * self.hosts // num_ranks for rank in range(num_ranks)]
        return [min(rank, self.hosts - 1) for rank in range(num_ranks)]

    @property
    def num_started(self) -> int:
        """The processes that are started: a torchrun on each host, a stub for each rank, or one for all ranks."""
        return self.hosts if self.has_torchrun or self.hosts == 1 else math.prod(self.layout)

    @property
    def ends_all(self) -> bool:
        """Whether the loss of the first host's coordinator ends the run: at the start nothing is agreed from which
        another could go on, and once the last of three hosts is out of the run the second one is half of two."""
        return self.host == 0 and (self.phase == "start" or (self.hosts, self.phase) == (3, "commit"))

    @property
    def is_torchrun_without_end(self) -> bool:
        """Whether the other hosts' torchruns, once training is over, wait five minutes for one that was killed, or has
        ended because its stub was. Its store is on host 0; without that they don't wait."""
        return self.has_torchrun and self.process in ("launcher", "stub") and self.what == "KILL" and self.host > 0


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


def torchrun_cells(hosts: int) -> list[SignalCell]:
    """Representatives of all pairs of a process and a phase."""
    return [
        SignalCell(hosts, process, host, what, phase, has_torchrun=True)
        for process, host, ends in TORCHRUN_ENDS[hosts]
        for what, phase in ends
    ]


def relay_cells(has_torchrun: bool, processes: Collection[str] = RELAY_PROCESSES) -> list[SignalCell]:
    """Cells of two hosts that have relays, with a sample of the phases: of the processes below a launcher, and of the
    second host's own one."""
    return [
        SignalCell(2, process, host, what, phase, has_torchrun, has_relays=True)
        for process in processes
        for host in ((0, 1) if process == "relay" else (0,) if process == "coordinator" else (1,))
        if has_torchrun or process != "launcher"
        for what, phase in itertools.product(("STOP", "CONT 3", "KILL"), ("start", "step", "confirm"))
    ]


def all_signal_cells() -> list[SignalCell]:
    """Each process, the launcher's own among them, on one host, and on the first and the second of three, in each
    phase; and those of hosts with relays."""
    phases = (*POINTS, *RECOVERY)
    places = [(1, 0), (3, 0), (3, 1)]
    return [
        *(
            SignalCell(hosts, process, host, what, phase, has_torchrun=has_torchrun)
            for has_torchrun, (hosts, host) in itertools.product((False, True), places)
            for process in ("launcher", "stub", "guardian", "coordinator", "worker")
            if (has_torchrun or process != "launcher") and (host == 0 or process != "coordinator")
            for what, phase in itertools.product(MOMENTS_S, phases)
        ),
        *(cell for hosts in (1, 3) for cell in signal_cells(hosts, STUB_AND_COORDINATOR, 0)),
        *relay_cells(False),
        *relay_cells(True),
    ]


def allowed_codes(cell: SignalCell) -> list[list[int]]:
    """The exit codes of the processes that were started: the right ones, or both where a moment decides."""
    if not cell.has_torchrun:
        return [_codes_of_stubs(cell)]
    codes = _codes_of_torchruns(cell)
    is_first_killed = cell.hosts > 1 and (cell.process, cell.host, cell.what) == ("launcher", 0, "KILL")
    if is_first_killed and cell.phase in ("start", *RECOVERY):
        return [codes, [codes[0], 1, 1]]  # the stub below it notices within a second: in which phase?
    return [codes]


def _codes_of_torchruns(cell: SignalCell) -> list[int]:
    """1 where a stub has ended with another code than 0."""
    codes = [-signal.SIGKILL if cell.is_torchrun_without_end else 0] * cell.num_started
    if cell.process == "stub" and cell.what == "KILL":
        codes = [1 if cell.ends_all else code for code in codes]
        codes[cell.host] = 1  # torchrun ends all others of this host
    if cell.process == "coordinator" and cell.what in ("STOP", "KILL") and cell.phase == "start":
        codes = [1] * cell.num_started
    if cell.process == "launcher" and cell.what == "KILL":
        codes[cell.host] = -signal.SIGKILL
    return codes


def _codes_of_stubs(cell: SignalCell) -> list[int]:
    is_lost = cell.what in ("STOP", "KILL")
    codes = [0] * cell.num_started
    if cell.process == "stub" and cell.what == "KILL":
        codes = [4 if cell.ends_all else 0] * cell.num_started
        codes[cell.host] = -signal.SIGKILL
    if cell.process == "coordinator" and is_lost and cell.phase == "start":
        codes = [4] * cell.num_started
    if cell.process == STUB_AND_COORDINATOR and is_lost:
        codes[cell.host] = 4
    if cell.process == "guardian" and is_lost and cell.hosts == 1:
        codes = [3]  # it had all workers
    return codes


def run_signal_cell(cell: SignalCell, directory: Path) -> str:
    """Runs a cell; returns what is wrong with its end, "" if nothing is."""
    directory.mkdir()
    # a worker that has not connected yet would end otherwise
    awaited = ["dawdling-1", *(f"pid-{rank}" for rank in range(math.prod(cell.layout)))]
    try:
        with started_world(partial(_start, cell, directory), directory, awaited) as world:
            pid = _pid_of(cell, world)
            coordinator = child_of(pid, "coordinator") if cell.process == STUB_AND_COORDINATOR else None
            clock = StrikeClock(world, pid)
            if coordinator is not None:
                os.kill(pid, signal.SIGSTOP)
                os.kill(coordinator, signal.SIGKILL)
            world.strike(pid, cell.what)
            if cell.process == "launcher" or cell.is_torchrun_without_end:
                world.await_end_below()
                if cell.what == "STOP":
                    os.kill(pid, signal.SIGCONT)  # the others wait for it
            if cell.is_torchrun_without_end:
                world.kill_started(once_ended=cell.host)
            outputs = world.end(pid if cell.what == "STOP" and cell.process in ("stub", STUB_AND_COORDINATOR) else None)
            wrong = _wrong(cell, world, outputs)
            clock.write(directory)
    except AssertionError as error:
        return f"{cell.name}: {error}"
    return "\n".join([f"{cell.name}: {wrong[0]}", *wrong[1:], *outputs]) if wrong else ""


def _wrong(cell: SignalCell, world: StruckWorld, outputs: list[str]) -> list[str]:
    codes = [stub.returncode for stub in world.processes]
    return [
        *([f"exit codes {codes}, not {allowed_codes(cell)}"] if codes not in allowed_codes(cell) else []),
        *(text for text in outputs if (has_own_traceback(text) if cell.has_torchrun else "Traceback" in text)),
        *(log for log in world.logs() if "Traceback" in log),
        *([] if cell.has_torchrun else _silent_hosts(cell, world, outputs)),
        *_wrong_finishers(cell, world),
        *([f"left behind: {left}"] if (left := world.left_behind()) else []),
    ]


def _silent_hosts(cell: SignalCell, world: StruckWorld, outputs: list[str]) -> list[str]:
    """A run that fails says why on every host of which a process is left to say it."""
    said: dict[int, bool] = {}
    for rank, (process, output) in enumerate(zip(world.processes, outputs)):
        if process.returncode > 0:
            host = cell.host_of_rank[rank]
            said[host] = said.get(host, False) or bool(re.search(SAYS_WHY, output))
    return [f"host {host} ended without a word" for host, has_said in said.items() if not has_said]


def _wrong_finishers(cell: SignalCell, world: StruckWorld) -> list[str]:
    """Workers end with their launcher and with their stub, long before their last step. Otherwise one comes to it."""
    finishers = {rank for rank, log in enumerate(world.logs()) if "done" in log}
    ranks = set(range(math.prod(cell.layout)))
    is_above = cell.process == "launcher" or (cell.process == "stub" and not cell.has_torchrun)
    is_lost = is_above and cell.what == "KILL"
    lost = {rank for rank in ranks if is_lost and cell.host_of_rank[rank] == cell.host}
    must_finish = lost != ranks and all(set(codes) <= {0, -signal.SIGKILL} for codes in allowed_codes(cell))
    return [
        *([f"without launcher or stub to their end: {finishers & lost}"] if finishers & lost else []),
        *(["none has finished"] if must_finish and not finishers else []),
    ]


def _start(cell: SignalCell, directory: Path) -> list[subprocess.Popen[str]]:
    last = len(cell.host_of_rank) - 1
    point, number = POINTS.get(cell.phase, (cell.phase, 1))
    has_loss = cell.phase in (*RECOVERY, "idle")
    faults = [[1, point, number, "dawdle"], *([[last, "step", 5, "kill"]] if has_loss else [])]
    spec = {**SPEC, "faults": faults, "layout": cell.layout, **({"relay_from": 2} if cell.has_relays else {})}
    if cell.has_torchrun:
        return start_under_torchrun(directory, "abc"[: cell.hosts], ranks_per_host=(last + 1) // cell.hosts, **spec)
    if cell.hosts > 1:
        return start_on_hosts(directory, ["abc"[host] for host in cell.host_of_rank], **spec)
    return [start(directory, **spec)]


def _pid_of(cell: SignalCell, world: StruckWorld) -> int:
    if cell.process == "launcher":
        return world.processes[cell.host].pid
    rank = cell.host_of_rank.index(cell.host) if cell.hosts > 1 else 2 if cell.phase == "idle" else 1
    if cell.process in ("coordinator", STUB_AND_COORDINATOR):
        rank = 0
    worker, guardian = map(int, (world.directory / f"pid-{rank}").read_text().split())
    stub = parent_of(guardian)
    if cell.process in ("coordinator", "relay"):
        return child_of(stub, cell.process)
    return {"worker": worker, "guardian": guardian}.get(cell.process, stub)
