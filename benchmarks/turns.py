"""Lets variants take a training step each in turn, so that all of them meet the machine in the same seconds.

They are started and warmed up one after the other, in processes of their own that stand still (SIGSTOP) but in their
turns. A peer's process stops itself after each step, whose time it prints. A run of ours is stopped from outside once
it has recorded a step; the step's time is that between two stops, less the pause.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from benchmarks.contestants import (
    WARMUP_STEPS,
    Run,
    RunFailed,
    Variant,
    end_processes,
    kernel_gflops,
    our_command,
    our_environment,
    our_steps,
    peer_commands,
    peer_steps,
    raise_if_failed,
    start_processes,
)
from benchmarks.peers.steps import STOP_VARIABLE
from benchmarks.peers.workload import Workload

POLL_S = 0.01
MANY_STEPS = 10_000
"""More than any benchmark takes: runs are killed."""
MARK_VARIABLE = "BENCHMARK_MARK"
"""In the environment of all processes of a run of ours."""


class Processes(Protocol):
    """A variant that has been started."""

    def run_step(self) -> float:
        """Lets all its processes do a step; returns the seconds. Raises RunFailed if one ends or none comes."""

    def figures(self) -> dict[str, Any]:
        """Figures of the result besides the speed."""

    def end(self) -> None:
        """Kills them."""


class Contestant:
    """A variant and its steps so far. After an error it takes no more turns."""

    def __init__(self, variant: Variant, processes: Processes):
        self.variant = variant
        self._processes = processes
        self._seconds: list[float] = []
        self._error: str | None = None

    def warm_up(self) -> None:
        self._run_steps(WARMUP_STEPS)

    def take_turn(self) -> None:
        self._seconds += self._run_steps(1)

    def result(self, workload: Workload, round_index: int, beside: str) -> Run:
        return Run(
            name=self.variant.name,
            round=round_index,
            beside=beside,
            tokens_per_s=[workload.tokens_per_step / seconds for seconds in self._seconds],
            error=self._error,
            **({} if self._error else self._processes.figures()),
        )

    def _run_steps(self, count: int) -> list[float]:
        if self._error is None:
            try:
                return [self._processes.run_step() for _ in range(count)]
            except RunFailed as error:
                self._error = str(error)
                self._processes.end()
        return []


class PeerProcesses:
    """A peer's script, one process a rank."""

    def __init__(self, variant: Variant, workload: Workload, folder: Path, options: argparse.Namespace):
        commands, environments = peer_commands(variant, workload, options.cores, MANY_STEPS)
        stopping = [environment | {STOP_VARIABLE: "1"} for environment in environments]
        self._folder, self._timeout_s = folder, options.timeout_s
        self._processes = list(start_processes(commands, stopping, folder))
        self._num_steps = 0

    def run_step(self) -> float:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
        self._num_steps += 1
        wait_until(self._is_done, self._processes, self._folder, self._timeout_s)
        return peer_steps(self._folder)[-1][0]

    def figures(self) -> dict[str, Any]:
        return {"loss": peer_steps(self._folder)[-1][1], "kernel_gflops": kernel_gflops(self._folder)}

    def end(self) -> None:
        end_processes(self._processes)

    def _is_done(self) -> bool:
        ranks = range(len(self._processes))
        return all(len(peer_steps(self._folder, rank)) == self._num_steps for rank in ranks) and all(
            stands_still(process.pid) for process in self._processes
        )


class OurProcesses:
    """A run of ours: the command, its guardian, its workers."""

    def __init__(self, variant: Variant, workload: Workload, folder: Path, options: argparse.Namespace):
        self._folder, self._timeout_s = folder, options.timeout_s
        self.mark = uuid.uuid4().hex
        """The value of MARK_VARIABLE in its processes."""
        command = our_command(variant, workload, folder, options, MANY_STEPS)
        environment = our_environment(variant) | {MARK_VARIABLE: self.mark}
        self._processes = list(start_processes([command], [environment], folder))
        self._num_steps = 0

    def run_step(self) -> float:
        started = time.perf_counter()
        self._signal(signal.SIGCONT)
        self._num_steps += 1
        wait_until(self._is_done, self._processes, self._folder, self._timeout_s)
        stopped = self._signal(signal.SIGSTOP)
        wait_until(lambda: all(map(stands_still, stopped)), self._processes, self._folder, self._timeout_s)
        return time.perf_counter() - started

    def figures(self) -> dict[str, Any]:
        return {"loss": our_steps(self._folder)[-1]["loss"]}

    def end(self) -> None:
        end_processes(self._processes)
        deadline = time.monotonic() + self._timeout_s
        while self._signal(signal.SIGKILL) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _is_done(self) -> bool:
        return len(our_steps(self._folder)) >= self._num_steps

    def _signal(self, number: int) -> list[int]:
        """Sends it to all processes of the run, which it returns."""
        pids = list(marked_processes(self.mark))
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids


def take_turns(
    variants: Sequence[Variant], workload: Workload, options: argparse.Namespace, *, round_index: int, beside: str
) -> list[Run]:
    """Starts the variants and lets each take `options.steps` steps in turn; errors are part of the results."""
    with ExitStack() as stack:
        contestants = []
        for variant in variants:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parallel3d-bench-")))
            kind = OurProcesses if variant.module is None else PeerProcesses
            processes = kind(variant, workload, folder, options)
            stack.callback(processes.end)
            contestants.append(Contestant(variant, processes))
            contestants[-1].warm_up()
            print(f"{beside}: {variant.name} is ready", file=sys.stderr, flush=True)
        for _ in range(options.steps):
            for contestant in contestants:
                contestant.take_turn()
        return [contestant.result(workload, round_index, beside) for contestant in contestants]


def wait_until(
    is_done: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]], folder: Path, timeout_s: float
) -> None:
    """Raises RunFailed if a process ends, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        codes = [process.poll() for process in processes]
        raise_if_failed(codes, folder)
        if 0 in codes:
            raise RunFailed("ended before its last step")
        if time.monotonic() > deadline:
            raise RunFailed(f"no step in {timeout_s:g} s")
        time.sleep(POLL_S)


def stands_still(pid: int) -> bool:
    """True if a process is stopped or has ended."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:1] in ([b"T"], [b"Z"], [])


def marked_processes(mark: str) -> Iterator[int]:
    """The processes that have this mark in their environment."""
    entry = f"{MARK_VARIABLE}={mark}".encode()
    for name in os.listdir("/proc"):
        if name.isdigit() and entry in _read(f"/proc/{name}/environ").split(b"\0"):
            yield int(name)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # it has ended
        return b""
