"""Forks worker processes and binds them to their guardian.

A worker can't outlive its guardian. It ignores SIGINT: a terminal sends Ctrl-C to the whole process group, and the
guardian decides what follows. What runs in the child is in worker/process.py.
"""

from __future__ import annotations

import ctypes
import signal
import socket
from collections.abc import Iterable
from typing import Protocol

from parallel3d.elastic.child_processes import fork_bound
from parallel3d.elastic.guardian.discovery import CoordinatorDiscovery
from parallel3d.elastic.guardian.heartbeat import Heartbeat, HeartbeatSlot
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.elastic.worker.process import WorkerMain, WorkerSpec, run_worker_process

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP_BYTES = 2**30


class HeldResource(Protocol):
    """A socket or selector that only the guardian may hold."""

    def close(self) -> None: ...


def fork_worker(
    spec: WorkerSpec,
    worker_main: WorkerMain,
    *,
    connection: socket.socket,
    discovery: CoordinatorDiscovery,
    slot: HeartbeatSlot,
    timeouts: LaunchTimeouts,
    held: Iterable[HeldResource],
) -> int:
    """Forks a worker, which calls `worker_main` once its guardian has reached the coordinator; returns its pid.

    Its control channel is `connection`, the other end of a socket pair. It writes its heartbeats to `slot`. What is
    `held` is closed in it: only its guardian may hold that, so that a pair ends with either of its processes.
    """

    def main() -> int:
        for each in held:
            each.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _keep_freed_memory()
        return run_worker_process(
            spec,
            worker_main,
            connection=connection,
            discovery=discovery,
            heartbeat=Heartbeat(slot),
            timeouts=timeouts,
        )

    return fork_bound(f"rank-{spec.rank}", main)


def _keep_freed_memory() -> None:
    """Lets glibc keep freed blocks for reuse: a step's activations cause no new page faults (7 % of a CPU step)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
