"""The coordinator's process, a child of the stub: opens the run's report, serves, and decides on restarts.

The run folder's lock and the witness are this process's alone, and end with it. It never forks. Messages to the stub:

    start      the secret is known and the report is open: the guardian may fork (all) workers
    refused    the run can't begin, and why
    moved      another host's coordinator goes on with the run
    done       the run's exit code
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from parallel3d.child_process import STOP_SIGNALS
from parallel3d.elastic.child_processes import ParentLink
from parallel3d.elastic.coordinator.coordinator import Coordinator
from parallel3d.elastic.coordinator.failover_coordinator import FailoverCoordinator
from parallel3d.elastic.coordinator.run_status import EXIT_BY_SIGNAL, RunOutcome
from parallel3d.elastic.coordinator.witness import Witness
from parallel3d.elastic.coordinator.worker_numbers import WorkerNumbers
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.elastic.guardian.signals import Signals
from parallel3d.elastic.operator_link import remove_address, write_address
from parallel3d.elastic.protocol.failover import FailoverPlan, GuardianInfo
from parallel3d.elastic.protocol.restart_policy import Restart, Stop
from parallel3d.elastic.settings import ElasticSettings, LaunchTimeouts
from parallel3d.errors import UserError
from parallel3d.monitor.sinks import RunReporter


class RestartHandler(Protocol):
    """Decides on restarts (restart_manager.py)."""

    @property
    def values(self) -> Mapping[str, bytes]:
        """Initial contents of the key-value store of the next start."""

    def next_action(self, report: RunReporter, outcome: RunOutcome, stopped: Callable[[], bool]) -> Restart | Stop:
        """Decides what follows a start that has ended, and logs it to the report, which is paused.

        Calls `stopped` again and again during long work.
        """


class NoRestarts(RestartHandler):
    """Never restarts."""

    values: Mapping[str, bytes] = MappingProxyType({})

    def next_action(self, report: RunReporter, outcome: RunOutcome, stopped: Callable[[], bool]) -> Restart | Stop:
        return Stop()


@dataclass(frozen=True, kw_only=True)
class CoordinatorSpec:
    """The arguments of the coordinator's process, known before it is forked."""

    listener: socket.socket
    """The stub keeps it open: a successor serves at the same address."""
    world_size: int
    own_info: GuardianInfo
    """This host's guardian, with the listener's address."""
    open_report: Callable[[], RunReporter]
    reopen_report: Callable[[], RunReporter]
    restart_handler: RestartHandler
    make_secret: Callable[[], RunSecret]
    timeouts: LaunchTimeouts
    elastic: ElasticSettings | None
    directory: Path
    """The run's folder: commands find the coordinator's address there."""

    @property
    def witness(self) -> Witness:
        return Witness(self.elastic.witness if self.elastic else None)


class CoordinatorProcess:
    """Runs in its own process; `begin` or `take_over` is its main function."""

    def __init__(self, spec: CoordinatorSpec, link: ParentLink, signals: Signals):
        self._spec = spec
        self._link = link
        self._signals = signals
        self._witness = spec.witness
        """Locked for as long as this process lives."""
        self._numbers = WorkerNumbers(spec.directory)
        self._secret = b""
        self._report: RunReporter | None = None

    def begin(self) -> int:
        """Begins the run, and restarts it as often as the handler decides; returns this process's exit code."""
        try:
            report = self._report = self._spec.open_report()
            run_secret = self._spec.make_secret()
            self._secret = run_secret.read()
            self._witness.lock_at_start()
            run_secret.write()
            write_address(self._spec.directory, self._spec.own_info.address)
        except UserError as error:
            self._link.send({"op": "refused", "text": str(error), "exit_code": error.exit_code})
            self._link.drain()
            return error.exit_code
        return self._end(self._run_restarts(report, self._serve(report)))

    def take_over(self, failover_plan: FailoverPlan, secret: bytes) -> int:
        """Goes on with the run of a coordinator that is lost."""
        assert self._spec.elastic is not None
        self._secret = secret
        outcome = FailoverCoordinator(
            self._spec.listener.dup(),
            secret=secret,
            failover_plan=failover_plan,
            witness=self._witness,
            open_report=self._reopen_report,
            world_size=self._spec.world_size,
            timeouts=self._spec.timeouts,
            elastic=self._spec.elastic,
            own_info=self._spec.own_info,
            on_turn=self._link.beat,
            numbers=self._numbers,
        ).serve()
        return self._end(self._run_restarts(self._report, outcome) if self._report else outcome)

    def _serve(self, report: RunReporter) -> RunOutcome:
        """Serves one start of the run."""
        self._numbers.forget()
        self._link.send({"op": "start", "secret": self._secret.hex()})
        report.start()
        return Coordinator(
            self._spec.listener.dup(),
            secret=self._secret,
            world_size=self._spec.world_size,
            emit=report.publish,
            flush=report.flush,
            timeouts=self._spec.timeouts,
            elastic=self._spec.elastic,
            own_info=self._spec.own_info,
            values=self._spec.restart_handler.values,
            on_turn=self._link.beat,
            witness=self._witness,
            numbers=self._numbers,
        ).serve()

    def _reopen_report(self) -> RunReporter:
        self._report = self._spec.reopen_report()
        self._report.start()
        self._numbers.resume()
        write_address(self._spec.directory, self._spec.own_info.address)
        return self._report

    def _run_restarts(self, report: RunReporter, outcome: RunOutcome) -> RunOutcome:
        """Restarts the run as often as the handler decides; returns the outcome of the last start."""
        while not outcome.moved_to:
            self._link.pause()
            report.pause()
            decision = self._spec.restart_handler.next_action(report, outcome, stopped=self._is_stopped)
            if isinstance(decision, Stop):
                return replace(outcome, message="\n".join(filter(None, (outcome.message, decision.why))))
            report.start()
            if self._signals.wait(decision.wait_s):
                message = f"stopped before the restart after step {decision.step}"
                return RunOutcome(exit_code=EXIT_BY_SIGNAL + self._signals.stops[0], message=message)
            report.pause()
            outcome = self._serve(report)
        return outcome

    def _is_stopped(self) -> bool:
        return bool(self._signals.stops)

    def _end(self, outcome: RunOutcome) -> int:
        """Closes the report, if this process has one, and sends the stub the exit code."""
        if outcome.moved_to:  # the run folder's lock ends with this process
            if self._report is not None:
                self._report.pause()
            self._link.send({"op": "moved"})
            self._link.drain()
            return 0
        if self._report is not None:
            remove_address(self._spec.directory, self._spec.own_info.address)
            self._numbers.forget()
            self._report.close(outcome.message, exit_code=outcome.exit_code)
        elif outcome.message:
            print(outcome.message, file=sys.stderr, flush=True)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._link.send({"op": "done", "exit_code": outcome.exit_code})
        self._link.drain()
        return 0


def run_coordinator_process(
    spec: CoordinatorSpec, link: ParentLink, *, failover: Mapping[str, Any] | None = None
) -> int:
    """The main function of the coordinator's process; `failover`: the guardian's request to take over, if it does."""
    with Signals() as signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        process = CoordinatorProcess(spec, link, signals)
        if failover is None:
            return process.begin()
        return process.take_over(FailoverPlan.from_json(failover["failover_plan"]), bytes.fromhex(failover["secret"]))
