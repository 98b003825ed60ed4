"""Runs a function in a world of worker processes, guarded by this process: the entry point for launch/ and tests.

no launcher                              torchrun and other launchers

this process: coordinator + guardian     a process per rank, each the guardian of one worker; rank 0's is also the
  |- worker 0                            coordinator. Workers find it through the launcher's TCPStore and send its
  |- worker 1 ...                        address to their guardians, which never import torch

Without a launcher, a run that has ended may restart here, with a full set of new workers (restart_manager.py).
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from parallel3d.elastic.coordinator.coordinator import SHUTDOWN_S, Coordinator, open_listener
from parallel3d.elastic.coordinator.failover_coordinator import FailoverCoordinator
from parallel3d.elastic.coordinator.run_status import EXIT_BY_SIGNAL, RunOutcome
from parallel3d.elastic.coordinator.witness import Witness
from parallel3d.elastic.guardian.discovery import CoordinatorDiscovery
from parallel3d.elastic.guardian.guardian import Guardian
from parallel3d.elastic.guardian.heartbeat import HeartbeatMonitor, HeartbeatPage
from parallel3d.elastic.guardian.launcher_env import LauncherEnv
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.elastic.guardian.signals import Signals
from parallel3d.elastic.guardian.spawn import fork_worker
from parallel3d.elastic.protocol.failover import FailoverPlan, GuardianInfo
from parallel3d.elastic.protocol.membership import Address
from parallel3d.elastic.protocol.restart_policy import Restart, Stop
from parallel3d.elastic.settings import ElasticSettings, LaunchTimeouts
from parallel3d.elastic.worker.process import WorkerMain, WorkerSpec
from parallel3d.monitor.sinks import RunReporter


class RestartHandler(Protocol):
    """Decides on restarts, in the coordinator's process (restart_manager.py)."""

    @property
    def values(self) -> Mapping[str, bytes]:
        """Initial contents of the key-value store of the next start."""

    def next_action(self, report: RunReporter, outcome: RunOutcome, stopped: Callable[[], bool]) -> Restart | Stop:
        """Decides what follows a start that has ended, and logs it to the report, which is paused."""


class NoRestarts(RestartHandler):
    """Never restarts."""

    values: Mapping[str, bytes] = MappingProxyType({})

    def next_action(self, report: RunReporter, outcome: RunOutcome, stopped: Callable[[], bool]) -> Restart | Stop:
        return Stop()


def run_workers(
    worker_main: WorkerMain,
    *,
    world_size: int,
    logs: Path,
    open_report: Callable[[], RunReporter],
    reopen_report: Callable[[], RunReporter] | None = None,
    restart_handler: RestartHandler | None = None,
    env: LauncherEnv | None = None,
    preload: Sequence[str] = (),
    timeouts: LaunchTimeouts | None = None,
    elastic: ElasticSettings | None = None,
    host: str | None = None,
) -> int:
    """Runs `worker_main` in every rank and returns the run's exit code; raises LaunchError before any worker starts.

    open_report: called in the coordinator's process alone, before anything starts.
    reopen_report: called by a failover coordinator; default `open_report`.
    preload: modules that this process imports once for all its workers, if it forks several (a lone guardian is light).
    elastic: without it the first loss ends the start.
    host: this host's name, if not the system's.
    """
    restart_handler = restart_handler or NoRestarts()
    is_coordinator = env is None or env.rank == 0
    listener = _open_listener(env) if is_coordinator else None  # others may connect while a checkpoint is being read
    report = open_report() if is_coordinator else None
    launch = _Launch(
        worker_main=worker_main,
        world_size=world_size,
        logs=logs,
        reopen_report=reopen_report or open_report,
        env=env,
        timeouts=timeouts or LaunchTimeouts(),
        elastic=elastic,
        host=host or socket.gethostname(),
        parent=os.getppid() if env else None,
        witness=Witness(elastic.witness if elastic else None),
        run_secret=RunSecret(env, logs.parent),
    )
    with Signals() as signals:
        for module in preload if env is None else ():
            importlib.import_module(module)
        outcome, own_report = launch.run(listener, report, restart_handler.values, signals)
        if report is not None:
            outcome = _run_restarts(launch, report, restart_handler, signals, outcome)
        if own_report is not None:
            own_report.close(outcome.message, exit_code=outcome.exit_code)
        elif outcome.message:
            print(outcome.message, file=sys.stderr, flush=True)
    return outcome.exit_code


def _run_restarts(
    launch: _Launch, report: RunReporter, restart_handler: RestartHandler, signals: Signals, outcome: RunOutcome
) -> RunOutcome:
    """Restarts the run as often as the handler decides; returns the outcome of the last start."""
    while True:
        report.pause()
        decision = restart_handler.next_action(report, outcome, stopped=lambda: bool(signals.stops))
        if isinstance(decision, Stop):
            return replace(outcome, message="\n".join(filter(None, (outcome.message, decision.why))))
        report.start()
        if signals.wait(decision.wait_s):
            message = f"stopped before the restart after step {decision.step}"
            return RunOutcome(exit_code=EXIT_BY_SIGNAL + signals.stops[0], message=message)
        report.pause()
        outcome, _ = launch.run(_open_listener(launch.env), report, restart_handler.values, signals)


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """The settings that all starts of a run share."""

    worker_main: WorkerMain
    world_size: int
    logs: Path
    reopen_report: Callable[[], RunReporter]
    env: LauncherEnv | None
    timeouts: LaunchTimeouts
    elastic: ElasticSettings | None
    host: str
    parent: int | None
    """The process ends with this parent."""
    witness: Witness
    run_secret: RunSecret

    def run(
        self,
        listener: socket.socket | None,
        report: RunReporter | None,
        values: Mapping[str, bytes],
        signals: Signals,
    ) -> tuple[RunOutcome, RunReporter | None]:
        """Runs one start: forks the workers and guards them until they end; also returns the report if it has one."""
        discovery = CoordinatorDiscovery(
            env=self.env, listener=listener, run_secret=self.run_secret, timeout_s=self.timeouts.start_s
        )
        specs = _worker_specs(self.world_size, self.logs, self.env, self.host)
        page = HeartbeatPage(len(specs))
        children, slots = {}, {}
        for number, spec in enumerate(specs):
            pid = fork_worker(
                spec, self.worker_main, discovery=discovery, slot=page.slot(number), timeouts=self.timeouts
            )
            children[pid], slots[pid] = spec.rank, page.slot(number)
        discovery.close_worker_ends()
        local_coordinator = _LocalCoordinator(
            self,
            listener or open_listener("" if _is_on_many_hosts(self.env) else "127.0.0.1", 0),
            own_ranks=tuple(children.values()),
            host_address=discovery.host_address(),
        )
        if report:  # threads only from here on: none survives a fork
            local_coordinator.begin(report, values)
        guardian = Guardian(
            children,
            monitor=HeartbeatMonitor(slots),
            discovery=discovery,
            signals=signals,
            timeouts=self.timeouts,
            own_info=local_coordinator.own_info,
            take_over=local_coordinator.take_over,
        )
        exit_code = guardian.monitor(parent=self.parent)
        discovery.close()
        return RunOutcome(exit_code=exit_code, message=local_coordinator.message()), local_coordinator.report


class _LocalCoordinator:
    """The coordinator in this process, if any: from the start, or after a failover."""

    def __init__(self, launch: _Launch, listener: socket.socket, *, own_ranks: tuple[int, ...], host_address: str):
        address = (host_address, listener.getsockname()[1])
        self.own_info = GuardianInfo(ranks=own_ranks, host=launch.host, address=address)
        self.report: RunReporter | None = None
        """The run's reporter, if this process serves."""
        self._launch = launch
        self._listener = listener
        self._coordinator: Coordinator | None = None

    def begin(self, report: RunReporter, values: Mapping[str, bytes]) -> None:
        self._launch.witness.lock_at_start()
        report.start()
        self.report = report
        self._coordinator = Coordinator(
            self._listener,
            secret=self._launch.run_secret.read(),
            world_size=self._launch.world_size,
            emit=report.publish,
            timeouts=self._launch.timeouts,
            elastic=self._launch.elastic,
            own_info=self.own_info,
            values=values,
        )
        self._coordinator.start()

    def take_over(self, failover_plan: FailoverPlan) -> Address:
        """Starts a failover coordinator; returns its address."""
        assert self._launch.elastic is not None
        self._coordinator = FailoverCoordinator(
            self._listener,
            secret=self._launch.run_secret.read(),
            failover_plan=failover_plan,
            witness=self._launch.witness,
            open_report=self._reopen_report,
            world_size=self._launch.world_size,
            timeouts=self._launch.timeouts,
            elastic=self._launch.elastic,
            own_info=self.own_info,
        )
        self._coordinator.start()
        return self.own_info.address

    def message(self) -> str:
        """Returns why the run has ended, if the coordinator is in this process."""
        return self._coordinator.join(SHUTDOWN_S + 1.0).message if self._coordinator else ""

    def _reopen_report(self) -> RunReporter:
        self.report = self._launch.reopen_report()
        self.report.start()
        return self.report


def _is_on_many_hosts(env: LauncherEnv | None) -> bool:
    return env is not None and env.local_world_size != env.world_size


def _worker_specs(world_size: int, logs: Path, env: LauncherEnv | None, host: str) -> list[WorkerSpec]:
    """Returns the workers that this process forks: all, or the one of its own rank."""
    if env is None:
        local_ranks, local_world_size = {rank: rank for rank in range(world_size)}, world_size
    else:
        local_ranks, local_world_size = {env.rank: env.local_rank}, env.local_world_size or world_size
    return [
        WorkerSpec(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            host=host,
            log=logs / f"rank-{rank}.log",
        )
        for rank, local_rank in local_ranks.items()
    ]


def _open_listener(env: LauncherEnv | None) -> socket.socket:
    if env is None:
        return open_listener("127.0.0.1", 0)
    port = 0 if env.agent_store else env.master_port
    return open_listener("" if _is_on_many_hosts(env) else "127.0.0.1", port)
