"""Runs a function in a world of worker processes: the entry point for launch/ and tests.

no launcher                              torchrun and other launchers

this process: the stub                   a stub for each rank, with the guardian of one worker; rank 0's also has the
  |- coordinator                         coordinator. Workers find it through the launcher's TCPStore and send its
  |- guardian                            address to their guardians, which never import torch. On large runs the stub
       |- worker 0                       of local rank 0 has the host's relay (guardian/relay.py)
       |- worker 1 ...

Without a launcher, a run that has ended may restart here, with a full set of new workers (restart_manager.py).
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parallel3d.elastic.child_processes import ParentLink
from parallel3d.elastic.coordinator.coordinator_process import (
    CoordinatorSpec,
    NoRestarts,
    RestartHandler,
    run_coordinator_process,
)
from parallel3d.elastic.coordinator.listener import open_listener
from parallel3d.elastic.guardian.discovery import (
    address_of_first_coordinator,
    host_address,
    listening_host,
    local_address,
)
from parallel3d.elastic.guardian.guardian_process import GuardianSpec, run_guardian_process
from parallel3d.elastic.guardian.launcher_env import LauncherEnv
from parallel3d.elastic.guardian.relay import RelaySpec, run_relay_process
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.elastic.protocol.failover import GuardianInfo
from parallel3d.elastic.protocol.membership import Address
from parallel3d.elastic.settings import ElasticSettings, LaunchTimeouts
from parallel3d.elastic.stub import ChildPrograms, Message, Stub
from parallel3d.elastic.worker.process import WorkerMain, WorkerSpec
from parallel3d.monitor.sinks import RunReporter

DEFAULT_TIMEOUTS = LaunchTimeouts()


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
    timeouts: LaunchTimeouts = DEFAULT_TIMEOUTS,
    elastic: ElasticSettings | None = None,
    host: str | None = None,
    parent: int | None = None,
) -> int:
    """Runs `worker_main` in every rank and returns the run's exit code; raises UserError before any worker starts.

    open_report: called in the coordinator's process, before any worker starts; reopen_report: in its successor's.
    preload: what a guardian of several workers imports once. elastic: without it the first loss ends the start.
    host: this host's name, if not the system's. parent: the run ends with this process, and with a launcher's.
    """
    listener = _open_listener(env)  # others may connect while a checkpoint is being read
    workers = _worker_specs(world_size, elastic, logs, env, host or socket.gethostname())
    own_info, make_secret = _guardian_info(workers, listener.getsockname()[1]), partial(RunSecret, env, logs.parent)
    guardian = GuardianSpec(
        worker_main=worker_main,
        workers=workers,
        own_info=own_info,
        local_coordinator=local_address(listener) if env is None or env.rank == 0 else None,
        env=env,
        preload=() if env else preload,
        make_secret=make_secret,
        timeouts=timeouts,
        elastic=elastic,
    )
    coordinator = CoordinatorSpec(
        listener=listener,
        world_size=world_size,
        own_info=own_info,
        open_report=open_report,
        reopen_report=reopen_report or open_report,
        restart_handler=restart_handler or NoRestarts(),
        make_secret=make_secret,
        timeouts=timeouts,
        elastic=elastic,
        directory=logs.parent,
    )
    gc.freeze()  # collections leave what is there alone: children go on sharing its pages, and Python's end is short
    with listener:
        return Stub(_Programs(coordinator, guardian), timeouts=timeouts, parent=os.getppid() if env else parent).run()


def _guardian_info(workers: Sequence[WorkerSpec], port: int) -> GuardianInfo:
    """Describes this host's guardian; the coordinator that takes over here listens at `port`."""
    host, address = workers[0].host, workers[0].address
    return GuardianInfo(ranks=tuple(worker.rank for worker in workers), host=host, address=(address, port))


@dataclass(frozen=True)
class _Programs(ChildPrograms):
    coordinator: CoordinatorSpec
    guardian: GuardianSpec

    @property
    def first_coordinator(self) -> Address | None:
        return self.guardian.local_coordinator

    @property
    def has_relay(self) -> bool:
        return self.guardian.has_relay and self.guardian.workers[0].local_rank == 0

    @property
    def known_address(self) -> Address | None:
        return self.first_coordinator or address_of_first_coordinator(self.guardian.env)

    def run_guardian(self, link: ParentLink) -> int:
        self.coordinator.listener.close()  # the stub's and the coordinator's: otherwise the port would outlive them
        return run_guardian_process(self.guardian, link)

    def run_relay(self, link: ParentLink, request: Message) -> int:
        self.coordinator.listener.close()
        spec = self.guardian
        relay = RelaySpec(host=spec.own_info.host, make_secret=spec.make_secret, timeouts=spec.timeouts)
        return run_relay_process(relay, link, request)

    def run_coordinator(self, link: ParentLink, failover: Message | None) -> int:
        return run_coordinator_process(self.coordinator, link, failover=failover)


def _worker_specs(
    world_size: int, elastic: ElasticSettings | None, logs: Path, env: LauncherEnv | None, host: str
) -> tuple[WorkerSpec, ...]:
    """Returns the workers of this process's guardian: all, or the one of its own rank. The last ones are spares."""
    if env is None:
        local_ranks, local_world_size = {rank: rank for rank in range(world_size)}, world_size
    else:
        local_ranks, local_world_size = {env.rank: env.local_rank}, env.local_world_size or world_size
    address = host_address(env)
    return tuple(
        WorkerSpec(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            host=host,
            address=address,
            log=logs / f"rank-{rank}.log",
            is_spare=elastic is not None and not elastic.grid.holds(rank),
        )
        for rank, local_rank in local_ranks.items()
    )


def _open_listener(env: LauncherEnv | None) -> socket.socket:
    """Opens the port of a coordinator on this host: of the first one, or of one that takes over."""
    is_at_master = env is not None and env.rank == 0 and not env.agent_store
    return open_listener(listening_host(env), env.master_port if is_at_master and env else 0)
