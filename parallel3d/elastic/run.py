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
from collections.abc import Callable, Sequence
from pathlib import Path

from parallel3d.elastic.coordinator import FAREWELL_S, Coordinator, Limits, open_listener
from parallel3d.elastic.finder import Finder
from parallel3d.elastic.guardian import Guardian, Signals
from parallel3d.elastic.launcher_env import LauncherEnv
from parallel3d.elastic.spawn import WorkerMain, WorkerPlace, fork_worker
from parallel3d.monitor.sinks import RunReport


def run_workers(
    worker_main: WorkerMain,
    *,
    world_size: int,
    logs: Path,
    open_report: Callable[[], RunReport],
    env: LauncherEnv | None = None,
    preload: Sequence[str] = (),
    limits: Limits | None = None,
) -> int:
    """Runs `worker_main` in every rank and returns the run's exit code; raises LaunchError before any worker starts.

    `open_report` is called in the coordinator's process alone, before anything starts. `preload` names modules that
    this process imports once for all its workers (only where it forks several: a guardian under torchrun stays light).
    """
    limits, parent = limits or Limits(), os.getppid()
    report = open_report() if env is None or env.rank == 0 else None
    listener = _open_listener(env) if report else None
    with Signals() as signals:
        if env is None:
            for module in preload:
                importlib.import_module(module)
        finder = Finder(env=env, listener=listener, timeout_s=limits.start_s)
        children = {
            fork_worker(place, worker_main, finder=finder, limits=limits): place.rank
            for place in _places(world_size, logs, env)
        }
        finder.forked()
        coordinator = None
        if listener and report:  # threads only from here on: none survives a fork
            report.start()
            coordinator = Coordinator(listener, world_size=world_size, emit=report.publish, limits=limits)
            coordinator.start()
        guardian = Guardian(children, finder=finder, signals=signals, limits=limits)
        exit_code = guardian.watch(parent=parent if env else None)
        finder.close()
        if coordinator and report:
            report.close(coordinator.join(FAREWELL_S + 1.0).message, exit_code=exit_code)
    return exit_code


def _places(world_size: int, logs: Path, env: LauncherEnv | None) -> list[WorkerPlace]:
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
            log=logs / f"rank-{rank}.log",
        )
        for rank, local_rank in local_ranks.items()
    ]


def _open_listener(env: LauncherEnv | None) -> socket.socket:
    if env is None:
        return open_listener("127.0.0.1", 0)
    port = 0 if env.agent_store else env.master_port
    return open_listener("127.0.0.1" if env.local_world_size == env.world_size else "", port)
