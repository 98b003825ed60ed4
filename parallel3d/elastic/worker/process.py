"""A forked worker process before and after its main function: its log, its connection, its exit.

At SIGTERM it announces a drain; before it is a member it ends at once.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from parallel3d.child_process import STOP_SIGNALS
from parallel3d.elastic.coordinator.run_status import describe_error
from parallel3d.elastic.guardian.discovery import CoordinatorDiscovery
from parallel3d.elastic.guardian.heartbeat import Heartbeat
from parallel3d.elastic.guardian.signals import STACK_DUMP_SIGNAL
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.elastic.worker.status_tracker import WorkerStatusTracker
from parallel3d.errors import EXIT_COORDINATOR_LOST, GenerationEnded, RunEnded, UserError, exit_code_of
from parallel3d.parallel.abort import Wait
from parallel3d.parallel.grid import PartId


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """A worker's position in the world, known before it runs."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    address: str
    """The host's address as the other workers reach it."""
    log: Path
    is_spare: bool = False
    """It waits until the run needs it for a part of the model."""
    part: PartId | None = None
    """For one that joins a run: the part of the model that it builds."""
    first_rank: int | None = None
    """For one in the place of another: the rank of the place's first worker."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """The arguments of a worker's main function."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    """The host's name."""
    address: str
    """The host's address as the other workers reach it."""
    secret: bytes
    """The run's, which links between workers prove."""
    control: ControlChannel
    heartbeat: Heartbeat
    worker_status: WorkerStatusTracker
    is_spare: bool = False
    """It waits until the run needs it for a part of the model."""
    part: PartId | None = None
    """For one that joins a run: the part of the model that it builds."""
    first_rank: int | None = None
    """For one in the place of another: the rank of the place's first worker."""


WorkerMain = Callable[[WorkerContext], int]


def run_worker_process(
    spec: WorkerSpec,
    worker_main: WorkerMain,
    *,
    connection: socket.socket,
    discovery: CoordinatorDiscovery,
    heartbeat: Heartbeat,
    timeouts: LaunchTimeouts,
) -> int:
    """Opens the control channel, runs `worker_main` and closes the channel; returns the exit code."""
    was_asked, hello = spec.part is not None, {"ranks": [spec.rank], "host": spec.host, "log": str(spec.log)}
    control = ControlChannel(
        connection,
        rank=spec.rank,
        world_size=spec.world_size,
        control_s=timeouts.control_s,
        joins=spec.is_spare or was_asked,
        part=spec.part,
        hello={"op": "hello", "role": "worker", **hello},
    )
    try:
        address = None if was_asked else discovery.look_up()
        secret = control.connect(address and (address, discovery.run_secret.read()))
    except UserError as error:
        print(f"rank {spec.rank}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except GenerationEnded:  # the guardian has said why
        return EXIT_COORDINATOR_LOST
    context = _make_context(spec, control, secret, heartbeat)
    heartbeat.start()
    leave_on_sigterm(control)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    exit_code = run_main(spec.log, worker_main, context)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    control.finish(exit_code)
    return exit_code


def _make_context(
    spec: WorkerSpec, control: ControlChannel, secret: bytes, heartbeat: Heartbeat
) -> WorkerContext:
    return WorkerContext(
        rank=spec.rank,
        world_size=spec.world_size,
        local_rank=spec.local_rank,
        local_world_size=spec.local_world_size,
        host=spec.host,
        address=spec.address,
        secret=secret,
        control=control,
        heartbeat=heartbeat,
        worker_status=observe_waits(control, heartbeat),
        is_spare=spec.is_spare and spec.part is None,
        part=spec.part,
        first_rank=spec.first_rank,
    )


def leave_on_sigterm(control: ControlChannel) -> None:
    """Has SIGTERM drain this worker; one that still builds its part ends at once, in the middle of it."""

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        control.announce_drain()
        if control.membership.is_building:
            raise SystemExit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    main_thread = threading.get_ident()
    control.on_dismissed = lambda: signal.pthread_kill(main_thread, signal.SIGTERM)


def observe_waits(control: ControlChannel, heartbeat: Heartbeat) -> WorkerStatusTracker:
    """Reports the channel's waits for peers to the heartbeat and to a new status tracker."""
    worker_status = WorkerStatusTracker()

    def on_wait(wait: Wait | None) -> None:
        heartbeat.on_wait(wait)
        worker_status.on_wait(wait)

    control.token.on_wait = on_wait
    control.worker_status = worker_status.report
    return worker_status


def run_main(log: Path, worker_main: WorkerMain, context: WorkerContext) -> int:
    """Runs the main function with its output in the log; reports an exception to the coordinator.

    The log has its traceback, unless it only follows from the end of the run: then the reason for that, in a line.
    """
    try:
        redirect_output(log)
        return worker_main(context)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception as error:
        if context.control.lost_coordinator:
            print(f"rank {context.rank} ends: {context.control.token.reason}", flush=True)
            return EXIT_COORDINATOR_LOST
        if isinstance(error, (GenerationEnded, RunEnded)):  # what ended it has been said elsewhere
            print(f"rank {context.rank} ends: {error}", flush=True)
        else:
            traceback.print_exc()
        context.control.report_error(describe_error(error, context.heartbeat.step))
        return exit_code_of(error)


class LogStream(io.TextIOBase):
    """An unbuffered text stream to a file descriptor. A full disk loses lines of the log but never ends a worker."""

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


def redirect_output(log: Path) -> None:
    """Appends everything that this process prints to its log, including C++ output and crash tracebacks."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file, open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = LogStream(1), LogStream(2)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_DUMP_SIGNAL, file=2, all_threads=True)  # in C: works even if Python hangs
