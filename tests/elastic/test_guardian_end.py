"""A guardian ends in the turn in which its last worker does, or when the run goes on without it."""

from __future__ import annotations

import os
import selectors
import socket
from pathlib import Path

from parallel3d.config.schema import NoticeConfig
from parallel3d.elastic.child_processes import ParentLink
from parallel3d.elastic.guardian import guardian as module
from parallel3d.elastic.guardian.discovery import CoordinatorDiscovery
from parallel3d.elastic.guardian.guardian import Guardian
from parallel3d.elastic.guardian.heartbeat import HeartbeatPage
from parallel3d.elastic.guardian.rejoin_schedule import RejoinSchedule
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.elastic.guardian.signals import Signals
from parallel3d.elastic.guardian.worker_forks import ForkedWorker, WorkerForks
from parallel3d.elastic.protocol.failover import GuardianInfo
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.elastic.worker.process import WorkerSpec

ADDRESS = ("127.0.0.1", 1)


def test_a_guardian_does_not_wait_once_its_last_worker_has_ended(monkeypatch):
    waits = []

    class Selector(selectors.DefaultSelector):
        def select(self, timeout=None):
            waits.append(timeout)
            return super().select(0.0)

    monkeypatch.setattr(module.selectors, "DefaultSelector", Selector)
    with Signals() as signals:
        assert guardian_of(ended_worker(3), signals).monitor() == 3
    assert waits == [0.0]


def test_a_guardian_that_comes_back_too_late_says_why_it_ends(capsys):
    with Signals() as signals:
        guardian = guardian_of(ended_worker(0), signals)
        guardian._handle({"op": "over", "exit_code": 4, "why": "the run goes on without this process"}, b"")
        assert guardian.monitor() == 4
    assert capsys.readouterr().err == "guardian of rank 0: the run goes on without this process\n"


def ended_worker(exit_code: int) -> ForkedWorker:
    """One that has ended, and that its parent has not collected."""
    pid = os.fork()
    if pid == 0:
        os._exit(exit_code)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ours, theirs = socket.socketpair()
    theirs.close()
    return ForkedWorker(rank=0, slot=0, pid=pid, end=ours, heartbeats=HeartbeatPage(1).slot(0))


def guardian_of(worker: ForkedWorker, signals: Signals) -> Guardian:
    run_secret, timeouts = RunSecret(None, Path(), value=b"secret"), LaunchTimeouts()
    discovery = CoordinatorDiscovery(env=None, known_address=ADDRESS, run_secret=run_secret, timeout_s=1.0)
    spec = WorkerSpec(
        rank=0, world_size=1, local_rank=0, local_world_size=1, host="a", address=ADDRESS[0], log=Path(), is_spare=False
    )
    rejoins = RejoinSchedule(0, 0.0)
    forks = WorkerForks([spec], lambda context: 0, discovery=discovery, timeouts=timeouts, rejoins=rejoins)
    return Guardian(
        [worker],
        forks=forks,
        address=None,
        is_at_coordinator=True,
        run_secret=run_secret,
        signals=signals,
        timeouts=timeouts,
        own_info=GuardianInfo(ranks=(0,), host="a", address=ADDRESS),
        link=ParentLink(socket.socketpair()[0], memoryview(bytearray(8)).cast("d")),
        notice=NoticeConfig(),
    )
