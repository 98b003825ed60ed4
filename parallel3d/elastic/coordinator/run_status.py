"""How a run ended and why: folds what workers and guardians tell into one outcome and one message.

Pure. When a worker dies, its peers fail too, and their complaints may arrive first: the cause is the earliest failure
that is not a mere consequence of another rank's. A loss that the run survives is no failure; it is part of one when the
run halts later.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.elastic.protocol.membership import LostWorker
from parallel3d.errors import EXIT_COORDINATOR_LOST, EXIT_WORKER_LOST, GenerationEnded, RunEnded
from parallel3d.parallel.grid import Grid

EXIT_BY_SIGNAL = 128

LOST_PEER_PHRASES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "pair closure")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One worker's failure: the exit code that it asks for, its one message, and whether another rank caused it."""

    rank: int | None
    """None: no single worker's."""
    exit_code: int
    message: str
    consequence: bool = False


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The run's end: its exit code and, unless it went well, the reason."""

    exit_code: int
    message: str = ""


@dataclass(kw_only=True)
class WorkerState:
    """What is known of one worker."""

    host: str = ""
    log: str = ""
    coordinates: str = ""
    step: int | None = None
    ended: bool = False
    done: bool = False
    """It has come to the run's end, or left when it was let go."""
    lost_worker: LostWorker | None = None
    """How it was lost, where the run went on."""


def describe_error(error: BaseException, step: int | None = None) -> dict[str, Any]:
    """An exception as the control channel carries it; `step`: that the worker is in."""
    lost_peer = isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in LOST_PEER_PHRASES)
    is_run_wide = getattr(error, "is_run_wide", False)
    return {
        "text": str(error) if is_run_wide else f"{type(error).__name__}: {error}",
        "is_run_wide": is_run_wide,
        "exit_code": getattr(error, "exit_code", 1),
        "consequence": lost_peer or isinstance(error, (GenerationEnded, RunEnded, ConnectionError)),
        "step": step,
    }


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The earliest failure that no other rank caused; where there is none, the earliest."""
    return min(failures, key=lambda failure: failure.consequence)


class RunStatus:
    """All that has been told about a run so far, in the order of arrival."""

    def __init__(self, world_size: int):
        self.workers = {rank: WorkerState() for rank in range(world_size)}
        self.failures: list[Failure] = []
        self.last_step: int | None = None
        self.stop_signal: int | None = None
        self._failed: set[int | None] = set()

    @property
    def over(self) -> bool:
        return all(worker.ended for worker in self.workers.values())

    def record_grid(self, grid: Grid) -> None:
        """Knows where every worker stands before it says so itself."""
        for rank in grid.ranks:
            self.workers[rank].coordinates = str(grid.coordinates(rank))

    def record_hello(self, rank: int, *, host: str, log: str) -> None:
        self.workers[rank].host, self.workers[rank].log = host, log

    def add_record(self, rank: int, record: dict[str, Any]) -> None:
        """Learns from a published record where the worker stands and how far the run is."""
        match record:
            case {"kind": "hello"}:
                self.workers[rank].coordinates = str(record.get("coordinates", ""))
            case {"kind": "step", "step": int(step)}:
                self.last_step = step

    def record_step(self, rank: int, step: int | None) -> None:
        """Which step a worker that has ended or failed was in, if it said so."""
        self.workers[rank].step = step or self.workers[rank].step

    def mark_done(self, ranks: Iterable[int]) -> None:
        """These workers may end with exit code 0."""
        for rank in ranks:
            self.workers[rank].done = True

    def record_error(self, rank: int, error: dict[str, Any]) -> None:
        """An exception that the worker reports before it ends."""
        self.record_step(rank, error["step"])
        message = error["text"]
        if not error["is_run_wide"]:
            message = f"{self.name(rank)}, {self._step(rank)}: {message}{self._log(rank)}"
        self._fail(rank, error["exit_code"], message, consequence=error["consequence"])

    def restore_after_failover(self, hosts: Mapping[int, str], last_step: int) -> None:
        """What was known when another coordinator was lost."""
        self.last_step = last_step or None
        for rank, host in hosts.items():
            self.workers[rank].host = self.workers[rank].host or host

    def mark_gone(self, ranks: Iterable[int]) -> None:
        """Workers of which nothing more is expected."""
        for rank in ranks:
            self.workers[rank].ended = self.workers[rank].done = True

    def is_needed(self, rank: int) -> bool:
        """Whether this worker may not end yet: the run is neither over for it nor being stopped."""
        return not self.workers[rank].done and self.stop_signal is None

    def record_exit(self, rank: int, *, exit_code: int, by_guardian: bool) -> None:
        """A guardian's waitpid: `exit_code` as in subprocess, minus the signal's number for a death by signal."""
        self.workers[rank].ended = True
        if by_guardian or exit_code == 0:
            return
        if exit_code < 0:
            self.record_fatal_loss(self.lost_by_signal(rank, -exit_code))
        else:
            message = f"{self.name(rank)} ended with exit code {exit_code} {self._where(rank)}{self._log(rank)}"
            self._fail(rank, exit_code, message)

    def record_early_exit(self, rank: int) -> None:
        """A worker that ended with exit code 0 while the others still needed it."""
        self.workers[rank].ended = True
        message = f"{self.name(rank)} ended with exit code 0 {self._where(rank)}, before the run was over"
        self._fail(rank, EXIT_WORKER_LOST, message + self._log(rank))

    def lost_by_signal(self, rank: int, signal_number: int, *, because: str = "") -> LostWorker:
        """`because`: why a guardian has killed it."""
        return LostWorker(rank=rank, why=f"{because or f'killed by {signal_name(signal_number)}'} {self._where(rank)}")

    def lost_with_guardian(self, rank: int) -> LostWorker:
        """The connection to a guardian broke: its workers die with it."""
        host = self.workers[rank].host or "its host"
        return LostWorker(rank=rank, why=f"lost {self._where(rank)}: its guardian on {host} is gone")

    def record_survived_loss(self, lost_worker: LostWorker) -> None:
        """The run goes on without this worker, as far as is known."""
        self.workers[lost_worker.rank].ended, self.workers[lost_worker.rank].lost_worker = True, lost_worker

    def record_fatal_loss(self, lost_worker: LostWorker) -> None:
        """The run ends with this worker."""
        self.workers[lost_worker.rank].ended = True
        self._fail(lost_worker.rank, EXIT_WORKER_LOST, self._describe_lost(lost_worker))

    def record_stop_run(self, reason: str) -> None:
        """The run can't go on, after losses that it might have survived one by one."""
        lost = [worker.lost_worker for worker in self.workers.values() if worker.lost_worker is not None]
        message = "\n".join(
            [f"the run can't go on: {reason}", *(self._describe_lost(lost_worker) for lost_worker in lost)]
        )
        self._fail(None, EXIT_WORKER_LOST, message)

    def record_lost_quorum(self, reason: str) -> None:
        """Too many hosts are out of reach: they may go on without this one, so it must not."""
        self._fail(None, EXIT_COORDINATOR_LOST, f"the run can't go on here: {reason}")

    def record_never_connected(self, ranks: Iterable[int], *, timeout_s: float) -> None:
        """Workers that have not said hello in time."""
        for rank in ranks:
            self.workers[rank].ended = True
            self._fail(rank, EXIT_WORKER_LOST, f"rank {rank} did not start within {timeout_s:g} s")

    def record_stop_signal(self, signal_number: int) -> None:
        if self.stop_signal is None:
            self.stop_signal = signal_number

    def outcome(self) -> RunOutcome:
        """The verdict on what is known: the cause of the failure, the stop asked for, or success."""
        if self.failures:
            cause = root_cause(self.failures)
            return RunOutcome(exit_code=cause.exit_code, message=cause.message)
        if self.stop_signal is not None:
            at = "before the first step" if self.last_step is None else f"after step {self.last_step}"
            return RunOutcome(exit_code=EXIT_BY_SIGNAL + self.stop_signal, message=f"stopped {at}")
        if self.over and all(worker.lost_worker for worker in self.workers.values()):
            return RunOutcome(exit_code=EXIT_WORKER_LOST, message="no worker has come to the run's end")
        return RunOutcome(exit_code=0)

    def name(self, rank: int) -> str:
        coordinates = self.workers[rank].coordinates
        return f"rank {rank} ({coordinates})" if coordinates else f"rank {rank}"

    def _fail(self, rank: int | None, exit_code: int, message: str, *, consequence: bool = False) -> None:
        if rank not in self._failed:  # the exit code that follows a reported exception says nothing new
            self._failed.add(rank)
            failure = Failure(rank=rank, exit_code=exit_code, message=message, consequence=consequence)
            self.failures.append(failure)

    def _step(self, rank: int) -> str:
        """The step that the worker says it is in, or else the one after the last that the run has finished."""
        step = self.workers[rank].step
        if step is None and self.last_step is not None:
            step = self.last_step + 1
        return "before the first step" if step is None else f"step {step}"

    def _where(self, rank: int) -> str:
        step = self._step(rank)
        return f"in {step}" if step.startswith("step") else step

    def _describe_lost(self, lost_worker: LostWorker) -> str:
        return f"{self.name(lost_worker.rank)} was {lost_worker.why}{self._log(lost_worker.rank)}"

    def _log(self, rank: int) -> str:
        worker = self.workers[rank]
        hosts = {other.host for other in self.workers.values() if other.host}
        location = f"{worker.host}:{worker.log}" if len(hosts) > 1 else worker.log
        return f"\n  log: {location}" if worker.log else ""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
