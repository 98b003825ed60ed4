"""Has workers leave that announce it, and all of a host that will be taken away; moves the coordinator off such a host.

If the run can't go on without them it saves and ends: by a signal's exit code, or by that of a preempted run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from parallel3d.elastic.coordinator.drains import DrainQueue
from parallel3d.elastic.coordinator.fences import Fences
from parallel3d.elastic.coordinator.membership_manager import MembershipManager
from parallel3d.elastic.coordinator.run_status import RunStatus
from parallel3d.elastic.coordinator.shutdown import Shutdown
from parallel3d.elastic.settings import ElasticSettings

Json = dict[str, Any]


class DrainManager:
    """Decides once a turn. `own_host`: the coordinator's."""

    def __init__(
        self,
        status: RunStatus,
        shutdown: Shutdown,
        fences: Fences,
        *,
        emit: Callable[[Json], None],
        own_host: str,
        elastic: ElasticSettings | None,
    ):
        self._status = status
        self._shutdown = shutdown
        self._fences = fences
        self._emit = emit
        self._own_host = own_host
        wanted = elastic.coordinator_host if elastic else None
        self._wanted_host = wanted if wanted != own_host else None
        """Where the coordinator should serve, until it has been decided on."""
        self._preemptions = shutdown.preemptions
        self._queue, self._commands = DrainQueue(), DrainQueue()
        self._leaving: set[int] = set()
        """Workers whose hosts become empty, or whose guardians have got SIGTERM: no coordinator moves there."""
        self._leaves_host = False
        """The coordinator's own host becomes empty."""
        self._seen: object = None
        """What the last decision about a move rested on."""
        self.find_recorded: Callable[[], Mapping[str, Collection[int]]] = lambda: {}
        """Returns the workers of each host whose notice another coordinator has recorded: guardians repeat notices."""

    @property
    def deadline_s(self) -> float:
        """When announced drains must be decided on."""
        return min(self._queue.deadline_s, self._commands.deadline_s)

    def announce(self, ranks: Collection[int], *, by_command: bool = False, by_guardian: bool = False) -> None:
        """Handles workers that must leave; `by_command`: a coordinator that is lost was asked to let them go;
        `by_guardian`: their guardian has got SIGTERM."""
        if by_guardian:
            self._leaving.update(ranks)
        (self._commands if by_command else self._queue).add(ranks, time.monotonic())

    def announce_preemption(self, host: str, header: Json, membership: MembershipManager | None) -> None:
        """Handles a notice of one of a host's guardians: all its workers must leave."""
        now_s, seconds = time.monotonic(), header["seconds"]
        ranks = self._preemptions.add(host, self._ranks_on(host), header["text"], due_s=now_s + seconds)
        if not (ranks or (host == self._own_host and not self._leaves_host)):
            return
        if (recorded := self.find_recorded().get(host)) is None or not set(ranks) <= set(recorded):
            text = f"host {host} is taken away in {seconds} s ({header['text']})"
            text = f"{text}: its workers leave at the next step boundary"
            self._emit({"kind": "preemption", "text": text, "host": host, "seconds": seconds, "ranks": ranks})
        self._leave(host)
        if membership:
            membership.keep_empty(host)
        if ranks:
            self._queue.add(ranks, now_s)

    def drain_slow(self, record: Json, membership: MembershipManager | None) -> None:
        """Has a replica leave that the leader has found to be too slow to be of use; its workers come back after a
        probation. A leader may ask again for one that leaves or has left."""
        ranks, text = record["ranks"], record["text"]
        if membership is None or self._status.stop_signal is not None or not membership.may_leave(ranks):
            return
        if reason := membership.drain(ranks, is_slow=True):
            self._emit({"kind": "notice", "text": f"{text}; but the run needs it: without, {reason}"})
            return
        text = f"{text}; it leaves at the next step boundary, after step {record['step']}"
        self._emit({**record, "kind": "drain", "text": text})

    def turn(self, membership: MembershipManager | None, live: Collection[int]) -> None:
        """Begins what is due. `membership`: None while no worker may leave; `live`: the workers of the run."""
        now_s = time.monotonic()
        if ranks := self._queue.take(live, now_s):
            self._drain(ranks, membership, live)
        if (ranks := self._commands.take(live, now_s)) and membership is not None:
            membership.drain_if_possible(ranks)
        late = {rank: why for rank, why in self._preemptions.take_due(now_s).items() if self._is_here(rank)}
        if self._status.stop_signal is None:
            self._fences.kill(late)
        if membership is not None and self._status.stop_signal is None:
            self._move(membership)

    def empty_host(self, host: str, membership: MembershipManager) -> bool:
        """Keeps a host empty whose workers leave; returns True if the coordinator, which is there, moves away."""
        membership.keep_empty(host)
        self._leave(host)
        return self._move(membership)

    def _leave(self, host: str) -> None:
        """Notes that a host becomes empty."""
        self._leaving.update(self._ranks_on(host))
        self._leaves_host |= host == self._own_host

    def _drain(self, ranks: Collection[int], membership: MembershipManager | None, live: Collection[int]) -> None:
        if membership is None or self._status.missing or set(ranks) >= set(live):
            self._shutdown.stop_without(ranks)
            return
        for rank in sorted(ranks):
            membership.announce_drain(rank)
        here = self._ranks_on(self._own_host)
        self._leaves_host |= bool(here) and self._leaving.issuperset(here)

    def _move(self, membership: MembershipManager) -> bool:
        """Has the coordinator move, if it should be elsewhere and can; returns True if it does."""
        protocol, committed = membership.protocol, membership.protocol.committed
        state = (protocol.num_changes, len(self._leaving), self._leaves_host)
        if committed is None or state == self._seen or not (self._leaves_host or self._wanted_host):
            return False
        self._seen = state
        hosts = {committed.hosts[rank] for rank in committed.members if rank not in self._leaving}
        if not self._leaves_host:
            wanted, self._wanted_host = str(self._wanted_host), None
            if wanted not in hosts:
                text = f"elastic.coordinator_host = {wanted!r}: no worker of the run is there; the coordinator stays"
                self._emit({"kind": "notice", "text": f"{text} on {self._own_host}"})
            hosts &= {wanted}
        return membership.hand_over(hosts - {self._own_host})

    def _ranks_on(self, host: str) -> list[int]:
        return sorted(rank for rank, worker in self._status.workers.items() if worker.host == host and not worker.ended)

    def _is_here(self, rank: int) -> bool:
        return rank in self._status.workers and not self._status.workers[rank].ended
