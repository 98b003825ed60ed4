"""The guardian's process, a child of the stub: forks the workers of each start and guards them. Single-threaded.

Messages from the stub:

    start      fork the workers, and guard them until the run is over. `secret`: if it is known. `lost_at`: the
               coordinator's address; the workers died with the guardian before this one, which reports that instead.
               `failover_plan`: the newest that it had
    signal     a stop signal or a user signal, sent to the stub

and to it:

    find       the coordinator's address, before it is reached: for the host's relay, if it is this stub's
    located    the coordinator's address and the run's secret, for a guardian that replaces this one
    failover_plan    who may take over, for the same
    take_over  start a failover coordinator on this host, with this plan
    ended      the run's exit code
"""

from __future__ import annotations

import importlib
import select
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from parallel3d.child_process import STOP_SIGNALS
from parallel3d.config.schema import NoticeConfig
from parallel3d.elastic.child_processes import ParentLink
from parallel3d.elastic.guardian.discovery import CoordinatorDiscovery
from parallel3d.elastic.guardian.guardian import Guardian
from parallel3d.elastic.guardian.launcher_env import LauncherEnv
from parallel3d.elastic.guardian.rejoin_schedule import RejoinSchedule
from parallel3d.elastic.guardian.relay import has_relay, relay_address
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.elastic.guardian.signals import Signals
from parallel3d.elastic.guardian.worker_forks import WorkerForks
from parallel3d.elastic.protocol.failover import FailoverPlan, GuardianInfo
from parallel3d.elastic.protocol.membership import Address
from parallel3d.elastic.settings import ElasticSettings, LaunchTimeouts
from parallel3d.elastic.worker.process import WorkerMain, WorkerSpec


@dataclass(frozen=True, kw_only=True)
class GuardianSpec:
    """The arguments of the guardian's process, known before it is forked."""

    worker_main: WorkerMain
    workers: tuple[WorkerSpec, ...]
    own_info: GuardianInfo
    local_coordinator: Address | None
    """The address of the coordinator that begins the run on this host, if it does."""
    env: LauncherEnv | None
    preload: Sequence[str]
    make_secret: Callable[..., RunSecret]
    timeouts: LaunchTimeouts
    elastic: ElasticSettings | None

    @property
    def has_relay(self) -> bool:
        """Whether this host's guardians share a connection."""
        return self.elastic is not None and has_relay(self.env, self.workers[0].world_size, self.elastic.relay_from)

    @property
    def max_rejoins(self) -> int:
        """How often a lost worker's place may be taken by a new one."""
        return self.elastic.max_rejoins if self.elastic and self.elastic.enabled else 0

    @property
    def notice(self) -> NoticeConfig:
        """How this guardian learns that its host will be taken away. Of several the first one asks for all."""
        notice = self.elastic.notice if self.elastic else NoticeConfig()
        if self.workers[0].local_rank == 0:
            return notice
        return NoticeConfig(signal=notice.signal, deadline_s=notice.deadline_s)


def run_guardian_process(spec: GuardianSpec, link: ParentLink) -> int:
    """The main function of the guardian's process: guards one start after the other."""
    with Signals() as signals:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to the whole process group: the stub passes it on
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        for module in spec.preload:
            importlib.import_module(module)
        while True:  # bounded: it dies with the stub
            link.pause()
            start = _await_start(link, signals)
            exit_code = _run_start(spec, start, link, signals)
            link.send({"op": "ended", "exit_code": exit_code})
            link.drain()


def _await_start(link: ParentLink, signals: Signals) -> dict[str, Any]:
    start: dict[str, Any] | None = None
    while start is None:
        select.select([link.connection], [], [])  # bounded: this process dies with the stub
        for message in link.receive():
            if message["op"] == "start":
                start = message
            else:
                signals.add(message["number"])
    return start


def _run_start(spec: GuardianSpec, start: dict[str, Any], link: ParentLink, signals: Signals) -> int:
    """Forks the workers and guards them until the run is over; returns its exit code."""
    lost_at = start.get("lost_at")
    run_secret = spec.make_secret(value=bytes.fromhex(start["secret"]) if "secret" in start else None)
    discovery = CoordinatorDiscovery(
        env=spec.env, known_address=spec.local_coordinator, run_secret=run_secret, timeout_s=spec.timeouts.start_s
    )
    forks = WorkerForks(
        spec.workers,
        spec.worker_main,
        discovery=discovery,
        timeouts=spec.timeouts,
        rejoins=RejoinSchedule(spec.max_rejoins, spec.elastic.probation_s if spec.elastic else 0.0),
    )
    return Guardian(
        [] if lost_at else forks.fork_first([link.connection]),
        forks=forks,
        address=(lost_at[0], lost_at[1]) if lost_at else discovery.address,
        is_at_coordinator=spec.local_coordinator is not None,
        run_secret=run_secret,
        signals=signals,
        timeouts=spec.timeouts,
        own_info=spec.own_info,
        link=link,
        notice=spec.notice,
        lost_ranks=[worker.rank for worker in spec.workers] if lost_at else (),
        failover_plan=FailoverPlan.from_json(start["failover_plan"]) if "failover_plan" in start else None,
        leaves=spec.env is not None and spec.env.joins,
        relay_address=partial(relay_address, host=spec.own_info.host) if spec.has_relay and not lost_at else None,
    ).monitor()
