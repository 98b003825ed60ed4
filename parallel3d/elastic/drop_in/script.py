"""Runs a user's script in a worker process: from its first line again, where `elastic.init()` then does nothing."""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

import torch

from parallel3d.elastic.drop_in.elastic_loop import CURRENT
from parallel3d.elastic.drop_in.generations import LeftRun
from parallel3d.elastic.drop_in.loop_network import SocketLoopNetwork
from parallel3d.elastic.drop_in.session import LoopHooks, Session
from parallel3d.elastic.guardian.heartbeat import Mode
from parallel3d.elastic.worker.memory_holder import memory_held
from parallel3d.elastic.worker.process import WorkerContext
from parallel3d.usable_cores import usable_cores


@dataclass(frozen=True, kw_only=True)
class Script:
    """How to run the script, and what `init` was given."""

    path: str
    module: str | None
    """Its name, if it was started by `python -m`."""
    seed: int
    patience_s: float


def run_worker_script(script: Script, context: WorkerContext) -> int:
    """The main function of a worker: runs the script to its end, and waits for the other workers'."""
    if context.is_spare and context.control.membership.await_part() is None:
        return 0
    print(f"rank {context.rank} is process {os.getpid()} on {context.host}", flush=True)
    session = open_session(script, context)
    CURRENT.set(session)
    sys.stdout = LeaderStream(sys.stdout, lambda: is_leader(session), lambda text: publish_line(context, text))
    torch.set_num_threads(max(1, usable_cores() // context.local_world_size))
    torch.manual_seed(script.seed)
    use_own_gpu(context.local_rank)
    try:
        with memory_held():
            if script.module:
                runpy.run_module(script.module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script.path, run_name="__main__")
    except LeftRun:
        raise
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    session.end()
    return 0


def use_own_gpu(local_rank: int) -> None:
    """Makes "cuda" this worker's own GPU; the script may choose another one. A launcher may show each worker one alone.
    Where there are more workers than GPUs, some share one: NCCL says that it refuses that."""
    if num_gpus := torch.cuda.device_count():
        torch.cuda.set_device(local_rank % num_gpus)


def open_session(script: Script, context: WorkerContext) -> Session:
    control = context.control

    def on_ready() -> None:
        context.heartbeat.mode = Mode.RUNNING
        if session.generations.is_leader:
            control.publish({"kind": "round_trip", "seconds": 0.0})  # the timeouts do not depend on it

    def on_step(step: int) -> None:
        context.heartbeat.step = step

    hooks = LoopHooks(
        publish=control.publish,
        stop_requested=lambda: control.stop_requested,
        drain_requested=lambda: control.drain_requested or control.membership.change_requested,
        on_step=on_step,
        on_progress=context.heartbeat.tick,
        on_ready=on_ready,
    )
    network = SocketLoopNetwork(context, device=lambda: session.device, timeout_s=script.patience_s)
    session = Session(
        rank=context.rank,
        membership=control.membership,
        network=network,
        host=context.host,
        hooks=hooks,
        seed=script.seed,
    )
    return session


def is_leader(session: Session) -> bool:
    """Whether this worker speaks for all: before the first generation worker 0 does."""
    return session.generations.is_leader or (session.generations.record is None and session.rank == 0)


def publish_line(context: WorkerContext, text: str) -> None:
    context.control.publish({"kind": "notice", "text": text})


class LeaderStream(io.TextIOBase):
    """Standard output: into the worker's log, and whole lines of the leader to the terminal as well."""

    def __init__(self, log: TextIO, is_leader: Callable[[], bool], publish: Callable[[str], None]):
        self._log = log
        self._is_leader = is_leader
        self._publish = publish
        self._line = ""

    def write(self, text: str) -> int:
        self._log.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.strip() and self._is_leader():
                self._publish(line)
        return len(text)

    def fileno(self) -> int:
        return self._log.fileno()

    def writable(self) -> bool:
        return True
