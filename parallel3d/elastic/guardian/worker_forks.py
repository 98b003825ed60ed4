"""Forks a guardian's workers: its first ones, and later others in their slots.

A slot is the place of one worker on this host: its number there, its heartbeats' part of the shared page. A worker that
joins later has a number of its own in the run, and its own log.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parallel3d.elastic.coordinator.run_status import signal_name
from parallel3d.elastic.guardian.discovery import CoordinatorDiscovery
from parallel3d.elastic.guardian.heartbeat import HeartbeatPage, HeartbeatSlot
from parallel3d.elastic.guardian.rejoin_schedule import RejoinSchedule
from parallel3d.elastic.guardian.spawn import HeldResource, fork_worker
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.elastic.worker.process import WorkerMain, WorkerSpec
from parallel3d.parallel.grid import PartId

EXCEPTION_MODULE = r"^(\w+\.)+(?=\w+: )"


@dataclass(frozen=True, kw_only=True)
class ForkedWorker:
    """A worker of this guardian."""

    rank: int
    slot: int
    pid: int
    end: socket.socket
    """The guardian's end of its control channel."""
    heartbeats: HeartbeatSlot


class WorkerForks:
    """Forks workers; `specs` are those of the first ones, by slot. `rejoins` says when slots are free for others."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        worker_main: WorkerMain,
        *,
        discovery: CoordinatorDiscovery,
        timeouts: LaunchTimeouts,
        rejoins: RejoinSchedule,
    ):
        self.rejoins = rejoins
        self.joined: list[int] = []
        """Workers that were to join the run from here."""
        self._specs = specs
        self._worker_main = worker_main
        self._discovery = discovery
        self._timeouts = timeouts
        self._page = HeartbeatPage(len(specs))
        self._slots = {spec.rank: slot for slot, spec in enumerate(specs)}
        """Of all workers that were ever here."""
        self._slow: set[int] = set()
        """Those that leave since they are slow."""

    def fork_first(self, held: Iterable[HeldResource]) -> list[ForkedWorker]:
        """Forks the first worker of every slot, in which `held` is closed."""
        workers: list[ForkedWorker] = []
        for slot, spec in enumerate(self._specs):
            workers.append(self._fork(slot, spec, [*held, *(worker.end for worker in workers)]))
        return workers

    def fork_joiner(self, slot: int, *, rank: int, part: PartId, held: Iterable[HeldResource]) -> ForkedWorker:
        """Forks a worker that joins the run as `rank`, in a slot that was offered. Raises OSError."""
        self.joined.append(rank)
        self._slots[rank] = slot
        if not self.rejoins.take(slot):
            raise OSError("the offer to start it is void")
        first = self._specs[slot]
        spec = replace(first, rank=rank, part=part, log=self._log(rank), first_rank=first.rank)
        return self._fork(slot, spec, held)

    def describe_end(self, rank: int, exit_code: int) -> str:
        """Returns how a worker has failed, and in a second line where its log is, whose last line is its exception."""
        log = self._log(rank)
        if exit_code < 0:
            return f"killed by {signal_name(-exit_code)}\n  log: {log}"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return f"ended with exit code {exit_code}: {re.sub(EXCEPTION_MODULE, '', ''.join(lines[-1:]))}\n  log: {log}"

    def on_lost(self, ranks: Iterable[int]) -> None:
        """Notes that workers are lost: after a while their slots are offered."""
        for rank in ranks:
            self.rejoins.on_lost(self._slots[rank], time.monotonic())

    def mark_slow(self, rank: int, leaves: bool) -> None:
        """Notes that a worker leaves since it is slow, or that it stays after all."""
        (self._slow.add if leaves else self._slow.discard)(rank)

    def on_left(self, rank: int) -> None:
        """Notes that a worker has left: after a probation the slot of a slow one is offered."""
        if rank in self._slow:
            self.rejoins.on_left_slow(self._slots[rank], time.monotonic())

    def _log(self, rank: int) -> Path:
        return self._specs[self._slots[rank]].log.with_name(f"rank-{rank}.log")

    def _fork(self, slot: int, spec: WorkerSpec, held: Iterable[HeldResource]) -> ForkedWorker:
        heartbeats = self._page.clear(slot)
        ours, theirs = socket.socketpair()
        with theirs:
            pid = fork_worker(
                spec,
                self._worker_main,
                connection=theirs,
                discovery=self._discovery,
                slot=heartbeats,
                timeouts=self._timeouts,
                held=(*held, ours),
            )
        return ForkedWorker(rank=spec.rank, slot=slot, pid=pid, end=ours, heartbeats=heartbeats)
