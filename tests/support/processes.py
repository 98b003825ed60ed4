"""Waits for the processes of a test, and checks that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 300


def pids(directory: Path) -> list[int]:
    """The processes that the workers have named: each worker and its guardian."""
    return [int(pid) for file in directory.glob("pid-*") for pid in file.read_text().split()]


def write_pids(directory: Path, rank: int) -> None:
    """Names this worker and its guardian in a file that is there only when it is whole: tests wait for its name."""
    unfinished = directory / f".pid-{rank}"
    unfinished.write_text(f"{os.getpid()} {os.getppid()}")
    unfinished.replace(directory / f"pid-{rank}")


def write_step(directory: Path, rank: int, generation: int, step: int) -> None:
    """Notes that this worker has made a step now."""
    with (directory / f"steps-{rank}").open("a") as file:
        file.write(f"{generation} {step} {time.monotonic():.4f}\n")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def read_to_the_end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Returns the output of a world. One that does not end is killed, and fails."""
    try:
        return process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
