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

from parallel3d.comm.abort import Wait
from parallel3d.elastic.control import Control, open_connection
from parallel3d.elastic.coordinator import Limits
from parallel3d.elastic.finder import Finder
from parallel3d.elastic.guardian import ASK_SIGNAL, STOP_SIGNALS
from parallel3d.elastic.pulse import Pulse, Slot
from parallel3d.elastic.verdict import describe_error
from parallel3d.elastic.whereabouts import Whereabouts
from parallel3d.errors import LaunchError, UserError

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
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
    control: Control
    pulse: Pulse
    whereabouts: Whereabouts


WorkerMain = Callable[[WorkerContext], int]


def fork_worker(place: WorkerPlace, worker_main: WorkerMain, *, finder: Finder, slot: Slot, limits: Limits) -> int:
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
                _bind_to(guardian)
                exit_code = _live(place, worker_main, finder, Pulse(slot), limits)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(exit_code)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _bind_to(guardian: int) -> None:
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


def _live(place: WorkerPlace, worker_main: WorkerMain, finder: Finder, pulse: Pulse, limits: Limits) -> int:
    hello = {"op": "hello", "role": "worker", "ranks": [place.rank], "host": place.host, "log": str(place.log)}
    try:
        address = finder.find()
        connection = open_connection(address, hello, timeout_s=limits.connect_s)
        finder.tell(address)
    except UserError as error:
        print(f"rank {place.rank}: {error}", file=sys.stderr, flush=True)
        return error.exit_code

    def reconnect(standing: dict[str, Any]) -> socket.socket | None:
        successor = finder.await_redirection()
        if successor is None:
            return None
        try:
            return open_connection(successor, {**hello, "standing": standing}, timeout_s=limits.connect_s)
        except LaunchError:
            return None

    control = Control(connection, rank=place.rank, world_size=place.world_size, reconnect=reconnect)
    whereabouts = Whereabouts()

    def note_wait(wait: Wait | None) -> None:
        pulse.note_wait(wait)
        whereabouts.note_wait(wait)

    control.token.note_wait = note_wait
    control.whereabouts = whereabouts.tell
    pulse.start()
    signal.signal(signal.SIGTERM, lambda number, frame: control.ask_to_leave())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    context = WorkerContext(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        host=place.host,
        address=finder.host_address(),
        control=control,
        pulse=pulse,
        whereabouts=whereabouts,
    )
    exit_code = _run(place.log, worker_main, context)
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
        context.control.report_error(describe_error(error, context.pulse.step))
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
    sys.stdout, sys.stderr = LogStream(1), LogStream(2)  # type: ignore[assignment]
    faulthandler.enable(file=2)
    faulthandler.register(ASK_SIGNAL, file=2, all_threads=True)  # in C: it needs nothing of a Python that hangs
