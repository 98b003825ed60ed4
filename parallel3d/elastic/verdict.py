"""How a run ended and why: folds what workers and guardians tell into one outcome and one message.

Pure. When a worker dies, its peers fail too, and their complaints may arrive first: the cause is the earliest failure
that is not a mere consequence of another rank's.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parallel3d.errors import EXIT_WORKER_LOST, EpochEnded

EXIT_BY_SIGNAL = 128

LOST_PEER_PHRASES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "pair closure")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One worker's failure: the exit code that it asks for, its one message, and whether another rank caused it."""

    rank: int
    exit_code: int
    message: str
    consequence: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
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


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as the control channel carries it."""
    lost_peer = isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in LOST_PEER_PHRASES)
    return {
        "text": f"{type(error).__name__}: {error}",
        "exit_code": getattr(error, "exit_code", 1),
        "consequence": lost_peer or isinstance(error, (EpochEnded, ConnectionError)),
    }


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The earliest failure that no other rank caused; where there is none, the earliest."""
    return min(failures, key=lambda failure: failure.consequence)


class RunBook:
    """All that has been told about a run so far, in the order of arrival."""

    def __init__(self, world_size: int):
        self.workers = {rank: WorkerState() for rank in range(world_size)}
        self.failures: list[Failure] = []
        self.last_step: int | None = None
        self.stop_signal: int | None = None
        self._failed: set[int] = set()

    @property
    def over(self) -> bool:
        return all(worker.ended for worker in self.workers.values())

    def note_hello(self, rank: int, *, host: str, log: str) -> None:
        self.workers[rank].host, self.workers[rank].log = host, log

    def note_record(self, rank: int, record: dict[str, Any]) -> None:
        """Learns from a published record where the worker stands and which step it is in."""
        match record:
            case {"kind": "hello"}:
                self.workers[rank].coordinates = str(record.get("coordinates", ""))
            case {"kind": "progress", "step": int(step)}:
                self.workers[rank].step = step
            case {"kind": "step", "step": int(step)}:
                self.last_step = step

    def note_error(self, rank: int, error: dict[str, Any]) -> None:
        """An exception that the worker reports before it ends."""
        message = f"{self.name(rank)}, {self._step(rank)}: {error['text']}{self._log(rank)}"
        self._fail(rank, error["exit_code"], message, consequence=error["consequence"])

    def note_end(self, rank: int, *, exit_code: int, by_guardian: bool) -> None:
        """A guardian's waitpid: `exit_code` as in subprocess, minus the signal's number for a death by signal."""
        self.workers[rank].ended = True
        if by_guardian or exit_code == 0:
            return
        if exit_code < 0:
            message = f"{self.name(rank)} was killed by {signal_name(-exit_code)} {self._where(rank)}{self._log(rank)}"
            self._fail(rank, EXIT_WORKER_LOST, message)
        else:
            message = f"{self.name(rank)} ended with exit code {exit_code} {self._where(rank)}{self._log(rank)}"
            self._fail(rank, exit_code, message)

    def note_lost_guardian(self, ranks: Iterable[int]) -> None:
        """The connection to a guardian broke: its workers die with it."""
        for rank in ranks:
            if not self.workers[rank].ended:
                self.workers[rank].ended = True
                host = self.workers[rank].host or "its host"
                message = f"{self.name(rank)} was lost {self._where(rank)}: its guardian on {host} is gone"
                self._fail(rank, EXIT_WORKER_LOST, message)

    def note_never_came(self, ranks: Iterable[int], *, timeout_s: float) -> None:
        """Workers that have not said hello in time."""
        for rank in ranks:
            self.workers[rank].ended = True
            self._fail(rank, EXIT_WORKER_LOST, f"rank {rank} did not start within {timeout_s:g} s")

    def note_stop(self, signal_number: int) -> None:
        if self.stop_signal is None:
            self.stop_signal = signal_number

    def outcome(self) -> Outcome:
        """The verdict on what is known: the cause of the failure, the stop asked for, or success."""
        if self.failures:
            cause = root_cause(self.failures)
            return Outcome(exit_code=cause.exit_code, message=cause.message)
        if self.stop_signal is not None:
            at = "before the first step" if self.last_step is None else f"after step {self.last_step}"
            return Outcome(exit_code=EXIT_BY_SIGNAL + self.stop_signal, message=f"stopped {at}")
        return Outcome(exit_code=0)

    def name(self, rank: int) -> str:
        coordinates = self.workers[rank].coordinates
        return f"rank {rank} ({coordinates})" if coordinates else f"rank {rank}"

    def _fail(self, rank: int, exit_code: int, message: str, *, consequence: bool = False) -> None:
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

    def _log(self, rank: int) -> str:
        worker = self.workers[rank]
        hosts = {other.host for other in self.workers.values() if other.host}
        place = f"{worker.host}:{worker.log}" if len(hosts) > 1 else worker.log
        return f"\n  log: {place}" if worker.log else ""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
