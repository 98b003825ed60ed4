"""Finds cut paths between hosts that both reach the coordinator, and evicts the smallest set of hosts.

Two workers that can't reach each other wait for each other: neither is stuck, and none is silent. When nothing moves
for a quarter of `control_s`, the coordinator asks the workers to probe the hosts of those for whom they wait, during
the other three quarters. So a cut path costs about the same time as a silent host. A round in which the run moves on
shows nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.fences import Fences
from parallel3d.elastic.coordinator.run_status import RunStatus
from parallel3d.elastic.protocol.probe_graph import Path, describe_cut, plan_eviction
from parallel3d.elastic.protocol.state_machine import MembershipProtocol

QUIET_SHARE, PROBE_SHARE = 0.25, 0.75
"""Parts of `control_s`: without progress before a round, and of a round."""
ANSWER_S = 2.0
"""For the answers after a round."""
ADVICE = "does a firewall close the ports at which workers listen? They are free ones of the system's choice"
MAX_GAP_S = 600.0
"""Between two rounds that have found nothing; at first it is `control_s`, then twice the last."""


@dataclass
class _Round:
    number: int
    deadline_s: float
    num_asked: int
    unreachable: dict[int, list[int]] = field(default_factory=dict)
    """Each answer: the ranks whose hosts did not answer."""


class PathCheck:
    """Asks for rounds of probes and evicts by their answers; `control_s` is the patience with a silent host."""

    def __init__(self, server: ConnectionServer, status: RunStatus, fences: Fences, *, control_s: float, own_host: str):
        self._server = server
        self._status = status
        self._fences = fences
        self._own_host = own_host
        self._control_s = control_s
        self._gap_s = control_s
        self._next_s = float("inf")
        self._seen: object = None
        self._num_rounds = 0
        self._round: _Round | None = None

    def check(self, protocol: MembershipProtocol, progress: object, now_s: float, *, has_trained: bool) -> str:
        """Begins or judges a round; `progress` is equal as long as the run does not move.

        Returns why the run can't go on, or "". Before the first step, a cut path is a mistake in the hosts' set-up
        rather than an accident: training on what a firewall leaves is not what was asked for.
        """
        if progress != self._seen:
            self._seen, self._round, self._gap_s = progress, None, self._control_s
            self._next_s = now_s + QUIET_SHARE * self._control_s
        elif self._round is None and now_s >= self._next_s:
            self._begin(protocol.live, now_s)
        elif cut := self._cut_paths(now_s):
            if has_trained:
                return self._evict(cut, protocol)
            return f"before the first step, {describe_cut(cut)}: {ADVICE}"
        return ""

    def add(self, rank: int, number: int, unreachable: list[int]) -> None:
        """Adds a worker's answer; one to another round is ignored, which a lost coordinator may have begun."""
        if self._round is not None and number == self._round.number:
            self._round.unreachable[rank] = unreachable

    def _begin(self, ranks: Collection[int], now_s: float) -> None:
        self._num_rounds += 1
        probe_s = PROBE_SHARE * self._control_s
        self._round = _Round(self._num_rounds, now_s + probe_s + ANSWER_S, len(ranks))
        self._server.send_to_workers(ranks, {"op": "probe", "round": self._num_rounds, "timeout_s": probe_s})

    def _cut_paths(self, now_s: float) -> frozenset[Path]:
        """The paths that a round has found cut, once it is over."""
        ended = self._round
        if ended is None or (now_s < ended.deadline_s and len(ended.unreachable) < ended.num_asked):
            return frozenset()
        self._round = None
        self._next_s, self._gap_s = now_s + self._gap_s, min(2 * self._gap_s, MAX_GAP_S)
        paths = {
            frozenset((self._host(rank), self._host(peer)))
            for rank, peers in ended.unreachable.items()
            for peer in peers
            if peer in self._status.workers
        }
        return frozenset(path for path in paths if len(path) == 2)

    def _evict(self, cut: Collection[Path], protocol: MembershipProtocol) -> str:
        def ranks_on(hosts: Collection[str]) -> list[int]:
            return [rank for rank in sorted(protocol.live) if self._host(rank) in hosts]

        plan = plan_eviction(
            cut,
            num_workers={host: len(ranks_on([host])) for path in cut for host in path},
            coordinator=self._own_host,
            can_spare=lambda hosts: protocol.can_spare(ranks_on(hosts)),
        )
        if not plan.hosts:
            return f"{plan.reason}, and the run needs both"
        self._fences.kill({rank: f"evicted: {plan.reason}" for rank in ranks_on(plan.hosts)})
        return ""

    def _host(self, rank: int) -> str:
        return self._status.workers[rank].host
