"""Runs a function in a world of worker processes, under this process's guard: the one way in for launch/ and tests.

no launcher around                       under torchrun (and its like)

this process: coordinator + guardian     a process per rank, each the guardian of one worker; rank 0's is the
  |- worker 0                            coordinator too. Workers find it through the launcher's TCPStore, and
  |- worker 1 ...                        tell their guardians, which never import torch

Started plainly, a run that has ended may begin again here, with a full set of new workers (elastic/supervisor.py).
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

from parallel3d.elastic.coordinator import FAREWELL_S, Coordinator, ElasticSettings, Limits, open_listener
from parallel3d.elastic.finder import Finder
from parallel3d.elastic.guardian import Guardian, Signals
from parallel3d.elastic.launcher_env import LauncherEnv
from parallel3d.elastic.membership import Address
from parallel3d.elastic.pulse import PulsePage, Watch
from parallel3d.elastic.restart import Again, NoMore
from parallel3d.elastic.spawn import WorkerMain, WorkerPlace, fork_worker
from parallel3d.elastic.succession import GuardianPlace, Roster, Witness
from parallel3d.elastic.successor import Successor
from parallel3d.elastic.verdict import EXIT_BY_SIGNAL, Outcome
from parallel3d.monitor.sinks import RunReport


class Supervision(Protocol):
    """What is known of a run beyond one start of it (elastic/supervisor.py); asked in the coordinator's process."""

    @property
    def values(self) -> Mapping[str, bytes]:
        """What the coordinator tells the workers of the next start, by key."""

    def follow(self, report: RunReport, outcome: Outcome, stopped: Callable[[], bool]) -> Again | NoMore:
        """What comes after a start that has ended. It is told to the report, which is paused."""


class NoSupervision(Supervision):
    """One start, whatever comes of it."""

    values: Mapping[str, bytes] = MappingProxyType({})

    def follow(self, report: RunReport, outcome: Outcome, stopped: Callable[[], bool]) -> Again | NoMore:
        return NoMore()


def run_workers(
    worker_main: WorkerMain,
    *,
    world_size: int,
    logs: Path,
    open_report: Callable[[], RunReport],
    reopen_report: Callable[[], RunReport] | None = None,
    supervision: Supervision | None = None,
    env: LauncherEnv | None = None,
    preload: Sequence[str] = (),
    limits: Limits | None = None,
    elastic: ElasticSettings | None = None,
    host: str | None = None,
) -> int:
    """Runs `worker_main` in every rank and returns the run's exit code; raises LaunchError before any worker starts.

    `open_report` is called in the coordinator's process alone, before anything starts; `reopen_report` (where it is
    missing, `open_report`) in that of a coordinator that takes over. `supervision` may begin the run again. `preload`
    names modules that this process imports once for all its workers (only where it forks several: a guardian under
    torchrun stays light). Without `elastic` the first loss ends the start. `host` names this host, where that is not
    what the system says.
    """
    world = _World(
        worker_main=worker_main,
        world_size=world_size,
        logs=logs,
        reopen_report=reopen_report or open_report,
        env=env,
        limits=limits or Limits(),
        elastic=elastic,
        host=host or socket.gethostname(),
        parent=os.getppid() if env else None,
        witness=Witness(elastic.witness if elastic else None),
    )
    supervision = supervision or NoSupervision()
    leads = env is None or env.rank == 0
    listener = _open_listener(env) if leads else None  # others may knock while a checkpoint is still being read
    report = open_report() if leads else None
    with Signals() as signals:
        if env is None:
            for module in preload:
                importlib.import_module(module)
        outcome, told = world.run(listener, report, supervision.values, signals)
        if report is not None:
            outcome = _run_again(world, report, supervision, signals, outcome)
        if told is not None:
            told.close(outcome.message, exit_code=outcome.exit_code)
        elif outcome.message:
            print(outcome.message, file=sys.stderr, flush=True)
    return outcome.exit_code


def _run_again(
    world: _World, report: RunReport, supervision: Supervision, signals: Signals, outcome: Outcome
) -> Outcome:
    """Further starts as long as one follows; how the last has ended."""
    while True:
        report.pause()
        decision = supervision.follow(report, outcome, stopped=lambda: bool(signals.stops))
        if isinstance(decision, NoMore):
            return replace(outcome, message="\n".join(filter(None, (outcome.message, decision.why))))
        report.start()
        if signals.wait(decision.wait_s):
            message = f"stopped before it began again after step {decision.step}"
            return Outcome(exit_code=EXIT_BY_SIGNAL + signals.stops[0], message=message)
        report.pause()
        outcome, _ = world.run(_open_listener(world.env), report, supervision.values, signals)


@dataclass(frozen=True, kw_only=True)
class _World:
    """What all starts of a run have in common."""

    worker_main: WorkerMain
    world_size: int
    logs: Path
    reopen_report: Callable[[], RunReport]
    env: LauncherEnv | None
    limits: Limits
    elastic: ElasticSettings | None
    host: str
    parent: int | None
    """Without it this process has nothing to live for."""
    witness: Witness

    def run(
        self,
        listener: socket.socket | None,
        report: RunReport | None,
        values: Mapping[str, bytes],
        signals: Signals,
    ) -> tuple[Outcome, RunReport | None]:
        """One start: forks the workers and guards them to their end. The second is the report that was told of it."""
        finder = Finder(env=self.env, listener=listener, timeout_s=self.limits.start_s)
        places = _places(self.world_size, self.logs, self.env, self.host)
        page = PulsePage(len(places))
        children, slots = {}, {}
        for number, place in enumerate(places):
            pid = fork_worker(place, self.worker_main, finder=finder, slot=page.slot(number), limits=self.limits)
            children[pid], slots[pid] = place.rank, page.slot(number)
        finder.forked()
        office = _Office(
            self,
            listener or open_listener("" if _is_on_many_hosts(self.env) else "127.0.0.1", 0),
            own_ranks=tuple(children.values()),
            host_address=finder.host_address(),
        )
        if report:  # threads only from here on: none survives a fork
            office.begin(report, values)
        guardian = Guardian(
            children,
            watch=Watch(slots),
            finder=finder,
            signals=signals,
            limits=self.limits,
            own=office.own,
            take_over=office.take_over,
        )
        exit_code = guardian.watch(parent=self.parent)
        finder.close()
        return Outcome(exit_code=exit_code, message=office.message()), office.report


class _Office:
    """Where this process serves as the run's coordinator, if it comes to that: from the start, or as a successor."""

    def __init__(self, world: _World, listener: socket.socket, *, own_ranks: tuple[int, ...], host_address: str):
        address = (host_address, listener.getsockname()[1])
        self.own = GuardianPlace(ranks=own_ranks, host=world.host, address=address)
        self.report: RunReport | None = None
        """What this process tells of the run."""
        self._world = world
        self._listener = listener
        self._coordinator: Coordinator | None = None

    def begin(self, report: RunReport, values: Mapping[str, bytes]) -> None:
        self._world.witness.take_first()
        report.start()
        self.report = report
        self._coordinator = Coordinator(
            self._listener,
            world_size=self._world.world_size,
            emit=report.publish,
            limits=self._world.limits,
            elastic=self._world.elastic,
            own=self.own,
            values=values,
        )
        self._coordinator.start()

    def take_over(self, roster: Roster) -> Address:
        """The coordinator is lost, and this host is its heir; returns where it serves."""
        assert self._world.elastic is not None
        self._coordinator = Successor(
            self._listener,
            roster=roster,
            witness=self._world.witness,
            open_report=self._open_again,
            world_size=self._world.world_size,
            limits=self._world.limits,
            elastic=self._world.elastic,
            own=self.own,
        )
        self._coordinator.start()
        return self.own.address

    def message(self) -> str:
        """Why the run has ended, where it was this process' to know."""
        return self._coordinator.join(FAREWELL_S + 1.0).message if self._coordinator else ""

    def _open_again(self) -> RunReport:
        self.report = self._world.reopen_report()
        self.report.start()
        return self.report


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
