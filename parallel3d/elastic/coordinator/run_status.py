"""How a run ended and why: combines the reports of workers and guardians into one outcome and one message. Pure.

When a worker dies, its peers fail too, and their errors may arrive first: the cause is the earliest failure that is not
merely a consequence of another rank's. A loss that the run survives is not a failure, but becomes part of one if the
run can't go on later.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.elastic.coordinator.worker_numbers import WorkerNumbers
from parallel3d.elastic.protocol.membership import GenerationRecord, LostWorker
from parallel3d.errors import (
    EXIT_COORDINATOR_LOST,
    EXIT_PREEMPTED,
    EXIT_WORKER_LOST,
    GenerationEnded,
    RunEnded,
    exit_code_of,
    is_out_of_memory,
)
from parallel3d.parallel.grid import Grid

EXIT_BY_SIGNAL = 128

LOST_PEER_PHRASES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "pair closure")

MEMORY_ADVICE = (
    "Lower batch.micro_batch_size (`parallel3d find-batch` finds the largest that fits), or set parallel.recompute"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure: the exit code that it asks for, its message, and whether it follows from another rank's."""

    rank: int | None
    """None: not a single worker's."""
    exit_code: int
    message: str
    consequence: bool = False


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The run's exit code and, unless it succeeded, the reason."""

    exit_code: int
    message: str = ""
    moved_to: str = ""
    """The host where another coordinator goes on with the run, if one does."""


@dataclass(kw_only=True)
class WorkerState:
    """One worker as the coordinator knows it."""

    host: str = ""
    log: str = ""
    coordinates: str = ""
    step: int | None = None
    ended: bool = False
    done: bool = False
    """It has reached the run's end, or left after a drain."""
    is_spare: bool = False
    """The run did not begin with it, and does not wait for it."""
    lost_worker: LostWorker | None = None
    """Set if the run went on without it."""


def describe_error(error: BaseException, step: int | None = None) -> dict[str, Any]:
    """Returns an exception in the form that the control channel carries; `step` is the worker's current one."""
    lost_peer = isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in LOST_PEER_PHRASES)
    is_run_wide = getattr(error, "is_run_wide", False)
    text = str(error) if is_run_wide else f"{type(error).__name__}: {error}"
    return {
        "text": f"{text}. {MEMORY_ADVICE}" if is_out_of_memory(error) else text,
        "is_run_wide": is_run_wide,
        "exit_code": exit_code_of(error),
        "consequence": lost_peer or isinstance(error, (GenerationEnded, RunEnded, ConnectionError)),
        "step": step,
    }


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Returns the earliest failure that no other rank caused, or else the earliest."""
    return min(failures, key=lambda failure: failure.consequence)


class RunStatus:
    """The state of a run as reported so far. With a `grid` the workers' coordinates are known from the start."""

    def __init__(self, world_size: int, grid: Grid | None = None, numbers: WorkerNumbers | None = None):
        self._numbers = numbers or WorkerNumbers()
        self.workers = {
            rank: WorkerState(coordinates=str(grid.coordinates(rank)) if grid and grid.holds(rank) else "")
            for rank in range(world_size)
        }
        for rank, worker in self.workers.items():
            worker.is_spare = grid is not None and not grid.holds(rank)
        self.failures: list[Failure] = []
        self.last_step: int | None = None
        self.stop_signal: int | None = None
        self._preempted = ""
        """Which hosts are taken away, if the run stops because of that."""
        self._failed: set[int | None] = set()

    @property
    def missing(self) -> list[int]:
        """Workers that the run waits for, since they have not connected yet."""
        return [rank for rank, worker in self.workers.items() if not (worker.host or worker.ended or worker.is_spare)]

    @property
    def over(self) -> bool:
        return all(worker.ended or (worker.is_spare and not worker.host) for worker in self.workers.values())

    def reserve_worker(self) -> int:
        """Adds a spare that a command starts; returns its number."""
        rank = self.take_number()
        self.workers[rank] = WorkerState(is_spare=True)
        return rank

    def take_number(self) -> int:
        """Returns a number that no worker has had."""
        return self._numbers.take(self.workers)

    def add_worker(self, rank: int, *, host: str, coordinates: str) -> None:
        """Adds a worker that its guardian on `host` starts during the run."""
        self.workers[rank] = WorkerState(host=host, coordinates=coordinates)

    def place(self, record: GenerationRecord) -> None:
        """Takes the coordinates of workers: in each generation some may get a place."""
        for rank in record.grid.ranks:
            self.workers[rank].coordinates = str(record.grid.coordinates(rank))

    def record_hello(self, rank: int, *, host: str, log: str) -> None:
        self.workers[rank].host, self.workers[rank].log = host, log

    def add_record(self, rank: int, record: dict[str, Any]) -> None:
        """Takes a worker's coordinates and the run's last step from a published record."""
        match record:
            case {"kind": "hello"}:
                self.workers[rank].coordinates = str(record.get("coordinates", ""))
            case {"kind": "step", "step": int(step)}:
                self.last_step = step

    def record_step(self, rank: int, step: int | None) -> None:
        """Records the step of a worker that has ended or failed; None: unknown."""
        self.workers[rank].step = step or self.workers[rank].step

    def mark_done(self, ranks: Iterable[int]) -> None:
        """Allows these workers to end with exit code 0."""
        for rank in ranks:
            self.workers[rank].done = True

    def record_error(self, rank: int, error: dict[str, Any]) -> None:
        """Records an exception that a worker reports before it ends."""
        self.record_step(rank, error["step"])
        message = error["text"]
        if not error["is_run_wide"]:
            message = f"{self.name(rank)}, {self._step(rank)}: {message}{self._log(rank)}"
        self._fail(rank, error["exit_code"], message, consequence=error["consequence"])

    def restore_after_failover(self, hosts: Mapping[int, str], last_step: int) -> None:
        """Restores what the lost coordinator knew."""
        self.last_step = last_step or None
        for rank, host in hosts.items():
            self.workers[rank].host = self.workers[rank].host or host

    def mark_gone(self, ranks: Iterable[int]) -> None:
        """Marks workers that left before this coordinator served."""
        for rank in ranks:
            self.workers[rank].ended = self.workers[rank].done = True

    def is_needed(self, rank: int) -> bool:
        """True if the worker must not end yet: it is not done and the run is not being stopped."""
        return not self.workers[rank].done and self.stop_signal is None

    def record_exit(self, rank: int, *, exit_code: int, by_guardian: bool) -> None:
        """Records an exit; `exit_code` as in subprocess: minus the signal's number for a death by signal."""
        self.workers[rank].ended = True
        if by_guardian or exit_code == 0:
            return
        if exit_code < 0:
            self.record_fatal_loss(self.lost_by_signal(rank, -exit_code))
        else:
            message = f"{self.name(rank)} ended with exit code {exit_code} {self._where(rank)}{self._log(rank)}"
            self._fail(rank, exit_code, message)

    def record_early_exit(self, rank: int) -> None:
        """Records a worker that ended with exit code 0 while others still needed it."""
        self.workers[rank].ended = True
        message = f"{self.name(rank)} ended with exit code 0 {self._where(rank)}, before the run was over"
        self._fail(rank, EXIT_WORKER_LOST, message + self._log(rank))

    def lost_by_signal(self, rank: int, signal_number: int, *, because: str = "") -> LostWorker:
        """Describes a worker killed by a signal; `because`: why its guardian has killed it."""
        return LostWorker(rank=rank, why=f"{because or f'killed by {signal_name(signal_number)}'} {self._where(rank)}")

    def lost_with_guardian(self, rank: int) -> LostWorker:
        """Describes a worker whose guardian is gone: workers die with their guardian."""
        host = self.workers[rank].host or "its host"
        return LostWorker(rank=rank, why=f"lost {self._where(rank)}: its guardian on {host} is gone")

    def why_without(self, ranks: Iterable[int]) -> str:
        """Says to a guardian that has come back too late why the run goes on without its ranks."""
        lost_workers = [self.workers[rank].lost_worker for rank in ranks]
        known = [self._describe_lost(lost_worker) for lost_worker in lost_workers if lost_worker is not None]
        why = "; ".join(known) or "it was taken for lost before this coordinator took over"
        return f"the run goes on without this process: {why}"

    def record_survived_loss(self, lost_worker: LostWorker) -> None:
        """Records a loss after which the run goes on."""
        self.workers[lost_worker.rank].ended, self.workers[lost_worker.rank].lost_worker = True, lost_worker

    def record_fatal_loss(self, lost_worker: LostWorker) -> None:
        """Records a loss that ends the run."""
        self.workers[lost_worker.rank].ended = True
        self._fail(lost_worker.rank, EXIT_WORKER_LOST, self._describe_lost(lost_worker))

    def record_stop_run(self, reason: str) -> None:
        """Ends the run after losses that it might have survived one by one."""
        lost = [worker.lost_worker for worker in self.workers.values() if worker.lost_worker is not None]
        message = "\n".join(
            [f"the run can't go on: {reason}", *(self._describe_lost(lost_worker) for lost_worker in lost)]
        )
        self._fail(None, EXIT_WORKER_LOST, message)

    def record_lost_quorum(self, reason: str) -> None:
        """Ends the run on this side: the hosts out of reach are enough to go on without it."""
        self._fail(None, EXIT_COORDINATOR_LOST, f"the run can't go on here: {reason}")

    def record_never_connected(self, ranks: Iterable[int], *, timeout_s: float) -> None:
        """Records workers that have not connected in time."""
        for rank in ranks:
            self.workers[rank].ended = True
            self._fail(rank, EXIT_WORKER_LOST, f"rank {rank} did not start within {timeout_s:g} s")

    def record_stop_signal(self, signal_number: int, *, preempted: str = "") -> None:
        if self.stop_signal is None:
            self.stop_signal, self._preempted = signal_number, preempted

    def outcome(self) -> RunOutcome:
        """Returns the cause of a failure, the requested stop, or success."""
        if self.failures:
            cause = root_cause(self.failures)
            return RunOutcome(exit_code=cause.exit_code, message=cause.message)
        if self.stop_signal is not None:
            at = "before the first step" if self.last_step is None else f"after step {self.last_step}"
            if self._preempted:
                return RunOutcome(exit_code=EXIT_PREEMPTED, message=f"stopped {at}: {self._preempted}")
            return RunOutcome(exit_code=EXIT_BY_SIGNAL + self.stop_signal, message=f"stopped {at}")
        if self.over and all(worker.lost_worker for worker in self.workers.values()):
            return RunOutcome(exit_code=EXIT_WORKER_LOST, message="no worker has reached the run's end")
        return RunOutcome(exit_code=0)

    def name(self, rank: int) -> str:
        coordinates = self.workers[rank].coordinates
        return f"rank {rank} ({coordinates})" if coordinates else f"rank {rank}"

    def _fail(self, rank: int | None, exit_code: int, message: str, *, consequence: bool = False) -> None:
        if rank not in self._failed:  # the exit code that follows a reported exception adds nothing
            self._failed.add(rank)
            failure = Failure(rank=rank, exit_code=exit_code, message=message, consequence=consequence)
            self.failures.append(failure)

    def _step(self, rank: int) -> str:
        """The step that the worker was in, as it reported, or else the one after the run's last completed step."""
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
