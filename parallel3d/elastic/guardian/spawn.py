"""A worker process: forked from its guardian, bound to it, with its own log, and a control channel.

A worker can't outlive its guardian (PR_SET_PDEATHSIG). It ignores SIGINT: a terminal sends Ctrl-C to the whole process
group, and it is the guardian that decides what follows. At SIGTERM it announces that it has to go.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d.elastic.coordinator.coordinator import LaunchTimeouts
from parallel3d.elastic.coordinator.run_status import describe_error
from parallel3d.elastic.guardian.discovery import CoordinatorDiscovery
from parallel3d.elastic.guardian.guardian import STACK_DUMP_SIGNAL, STOP_SIGNALS
from parallel3d.elastic.guardian.heartbeat import Heartbeat, HeartbeatSlot
from parallel3d.elastic.worker.control_channel import ControlChannel, open_connection
from parallel3d.elastic.worker.worker_status import WorkerStatusTracker
from parallel3d.errors import LaunchError, UserError
from parallel3d.parallel.abort import Wait

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Where a worker stands before it runs."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    log: Path


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What a worker's main function is given."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    """The host's name."""
    address: str
    """The host's address as the other workers reach it."""
    control: ControlChannel
    heartbeat: Heartbeat
    worker_status: WorkerStatusTracker


WorkerMain = Callable[[WorkerContext], int]


def fork_worker(
    spec: WorkerSpec,
    worker_main: WorkerMain,
    *,
    discovery: CoordinatorDiscovery,
    slot: HeartbeatSlot,
    timeouts: LaunchTimeouts,
) -> int:
    """The pid of a new worker, which calls `worker_main` once it is connected to the coordinator.

    It gives its signs of life in `slot`.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    guardian = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # none may reach the child before it knows what to do
    try:
        pid = os.fork()
        if pid == 0:
            exit_code = 1
            try:
                _bind_to_guardian(guardian)
                exit_code = _run_child(spec, worker_main, discovery, Heartbeat(slot), timeouts)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(exit_code)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _bind_to_guardian(guardian: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:  # it died between the fork and here
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _keep_freed_memory(libc)


def _keep_freed_memory(libc: ctypes.CDLL) -> None:
    """Lets glibc keep large blocks for reuse: a step's activations fault no pages in again (7 % of a CPU step)."""
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)


def _run_child(
    spec: WorkerSpec,
    worker_main: WorkerMain,
    discovery: CoordinatorDiscovery,
    heartbeat: Heartbeat,
    timeouts: LaunchTimeouts,
) -> int:
    hello = {"op": "hello", "role": "worker", "ranks": [spec.rank], "host": spec.host, "log": str(spec.log)}
    try:
        address = discovery.find()
        connection = open_connection(address, hello, timeout_s=timeouts.connect_s)
        discovery.report(address)
    except UserError as error:
        print(f"rank {spec.rank}: {error}", file=sys.stderr, flush=True)
        return error.exit_code

    def reconnect(membership_state: dict[str, Any]) -> socket.socket | None:
        new_address = discovery.await_new_address()
        if new_address is None:
            return None
        try:
            return open_connection(
                new_address, {**hello, "membership_state": membership_state}, timeout_s=timeouts.connect_s
            )
        except LaunchError:
            return None

    control = ControlChannel(connection, rank=spec.rank, world_size=spec.world_size, reconnect=reconnect)
    worker_status = WorkerStatusTracker()

    def on_wait(wait: Wait | None) -> None:
        heartbeat.on_wait(wait)
        worker_status.on_wait(wait)

    control.token.on_wait = on_wait
    control.worker_status = worker_status.report
    heartbeat.start()
    signal.signal(signal.SIGTERM, lambda number, frame: control.announce_drain())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    context = WorkerContext(
        rank=spec.rank,
        world_size=spec.world_size,
        local_rank=spec.local_rank,
        local_world_size=spec.local_world_size,
        host=spec.host,
        address=discovery.host_address(),
        control=control,
        heartbeat=heartbeat,
        worker_status=worker_status,
    )
    exit_code = _run(spec.log, worker_main, context)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    control.finish(exit_code)
    return exit_code


def _run(log: Path, worker_main: WorkerMain, context: WorkerContext) -> int:
    try:
        _write_output_to(log)
        return worker_main(context)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception as error:
        traceback.print_exc()
        context.control.report_error(describe_error(error, context.heartbeat.step))
        return getattr(error, "exit_code", 1)


class LogStream(io.TextIOBase):
    """Text to a file descriptor, at once. A full disk loses lines of the log, and never ends a worker."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        with suppress(OSError):
            os.write(self._descriptor, text.encode(errors="backslashreplace"))
        return len(text)

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True


def _write_output_to(log: Path) -> None:
    """Sends everything this process prints, C++ and a crash's traceback included, to the end of its log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = LogStream(1), LogStream(2)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_DUMP_SIGNAL, file=2, all_threads=True)  # in C: it needs nothing of a Python that hangs
