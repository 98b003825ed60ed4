"""Runs a function in a world of worker processes, under this process's guard: the one way in for launch/ and tests.

no launcher around                       under torchrun (and its like)

this process: coordinator + guardian     a process per rank, each the guardian of one worker; rank 0's is the
  |- worker 0                            coordinator too. Workers find it through the launcher's TCPStore, and
  |- worker 1 ...                        tell their guardians, which never import torch
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from parallel3d.elastic.coordinator import FAREWELL_S, Coordinator, ElasticSettings, Limits, open_listener
from parallel3d.elastic.finder import Finder
from parallel3d.elastic.guardian import Guardian, Signals
from parallel3d.elastic.launcher_env import LauncherEnv
from parallel3d.elastic.membership import Address
from parallel3d.elastic.pulse import PulsePage, Watch
from parallel3d.elastic.spawn import WorkerMain, WorkerPlace, fork_worker
from parallel3d.elastic.succession import GuardianPlace, Roster, Witness
from parallel3d.elastic.successor import Successor
from parallel3d.monitor.sinks import RunReport


def run_workers(
    worker_main: WorkerMain,
    *,
    world_size: int,
    logs: Path,
    open_report: Callable[[], RunReport],
    reopen_report: Callable[[], RunReport] | None = None,
    env: LauncherEnv | None = None,
    preload: Sequence[str] = (),
    limits: Limits | None = None,
    elastic: ElasticSettings | None = None,
    host: str | None = None,
) -> int:
    """Runs `worker_main` in every rank and returns the run's exit code; raises LaunchError before any worker starts.

    `open_report` is called in the coordinator's process alone, before anything starts; `reopen_report` (where it is
    missing, `open_report`) in that of a coordinator that takes over. `preload` names modules that this process imports
    once for all its workers (only where it forks several: a guardian under torchrun stays light). Without `elastic` the
    first loss ends the run. `host` names this host, where that is not what the system says.
    """
    limits, parent, host = limits or Limits(), os.getppid(), host or socket.gethostname()
    report = open_report() if env is None or env.rank == 0 else None
    listener = _open_listener(env) if report else None
    with Signals() as signals:
        if env is None:
            for module in preload:
                importlib.import_module(module)
        finder = Finder(env=env, listener=listener, timeout_s=limits.start_s)
        places = _places(world_size, logs, env, host)
        page = PulsePage(len(places))
        children, slots = {}, {}
        for number, place in enumerate(places):
            pid = fork_worker(place, worker_main, finder=finder, slot=page.slot(number), limits=limits)
            children[pid], slots[pid] = place.rank, page.slot(number)
        finder.forked()
        office = _Office(
            listener or open_listener("" if _is_on_many_hosts(env) else "127.0.0.1", 0),
            own_ranks=tuple(children.values()),
            host=host,
            host_address=finder.host_address(),
            world_size=world_size,
            limits=limits,
            elastic=elastic,
            reopen_report=reopen_report or open_report,
        )
        if report:  # threads only from here on: none survives a fork
            office.begin(report)
        guardian = Guardian(
            children,
            watch=Watch(slots),
            finder=finder,
            signals=signals,
            limits=limits,
            own=office.own,
            take_over=office.take_over,
        )
        exit_code = guardian.watch(parent=parent if env else None)
        finder.close()
        office.close(exit_code)
    return exit_code


class _Office:
    """Where this process serves as the run's coordinator, if it comes to that: from the start, or as a successor."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        own_ranks: tuple[int, ...],
        host: str,
        host_address: str,
        world_size: int,
        limits: Limits,
        elastic: ElasticSettings | None,
        reopen_report: Callable[[], RunReport],
    ):
        self.own = GuardianPlace(ranks=own_ranks, host=host, address=(host_address, listener.getsockname()[1]))
        self._listener = listener
        self._world_size = world_size
        self._limits = limits
        self._elastic = elastic
        self._reopen_report = reopen_report
        self._witness = Witness(elastic.witness if elastic else None)
        self._report: RunReport | None = None
        self._coordinator: Coordinator | None = None

    def begin(self, report: RunReport) -> None:
        self._witness.take_first()
        report.start()
        self._report = report
        self._coordinator = Coordinator(
            self._listener,
            world_size=self._world_size,
            emit=report.publish,
            limits=self._limits,
            elastic=self._elastic,
            own=self.own,
        )
        self._coordinator.start()

    def take_over(self, roster: Roster) -> Address:
        """The coordinator is lost, and this host is its heir; returns where it serves."""
        assert self._elastic is not None
        self._coordinator = Successor(
            self._listener,
            roster=roster,
            witness=self._witness,
            open_report=self._open_again,
            world_size=self._world_size,
            limits=self._limits,
            elastic=self._elastic,
            own=self.own,
        )
        self._coordinator.start()
        return self.own.address

    def close(self, exit_code: int) -> None:
        """Tells how the run has ended, where it was this process' to know."""
        message = self._coordinator.join(FAREWELL_S + 1.0).message if self._coordinator else ""
        if self._report:
            self._report.close(message, exit_code=exit_code)
        elif message:
            print(message, file=sys.stderr, flush=True)

    def _open_again(self) -> RunReport:
        self._report = self._reopen_report()
        self._report.start()
        return self._report


def _is_on_many_hosts(env: LauncherEnv | None) -> bool:
    return env is not None and env.local_world_size != env.world_size


def _places(world_size: int, logs: Path, env: LauncherEnv | None, host: str) -> list[WorkerPlace]:
    """The workers that this process forks: all, or the one of its own rank."""
    if env is None:
        local_ranks, local_world_size = {rank: rank for rank in range(world_size)}, world_size
    else:
        local_ranks, local_world_size = {env.rank: env.local_rank}, env.local_world_size or world_size
    return [
        WorkerPlace(
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
