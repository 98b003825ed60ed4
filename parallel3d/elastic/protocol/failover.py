"""Failover: which guardian serves as coordinator when the coordinator's host is lost, and whether it may. Pure.

After every committed generation the coordinator sends the failover plan: whole to the candidates, in brief to the
other guardians. When their connections to it break, they first try the same address: if only its process is lost, the
stub that has seen it end starts a successor there. Else the guardians of the other hosts try the candidates, one per
host, in rank order, beginning after the lost host. The first that answers checks its quorum: it serves if it reaches
more than half of the last generation's hosts, or half of them and holds the witness (coordinator/witness.py). The other
side, if it is alive at all, can have neither. For the same reason a coordinator that loses its connections to more than
half of the hosts stops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parallel3d.elastic.protocol.membership import Address


@dataclass(frozen=True, kw_only=True)
class GuardianInfo:
    """One guardian: the ranks that it guards, and where it would serve as coordinator."""

    ranks: tuple[int, ...]
    host: str
    address: Address

    def to_json(self) -> dict[str, Any]:
        return {"ranks": list(self.ranks), "host": self.host, "address": list(self.address)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> GuardianInfo:
        host, port = data["address"]
        return GuardianInfo(ranks=tuple(data["ranks"]), host=data["host"], address=(host, port))


MAX_CANDIDATES = 8
"""Hosts that may take over one loss of the coordinator's."""


@dataclass(frozen=True, kw_only=True)
class FailoverPlan:
    """The guardians' instructions for the loss of the coordinator."""

    coordinator: GuardianInfo
    """The guardian of its host's stub, at whose listener it serves."""
    guardians: tuple[GuardianInfo, ...]
    """In rank order."""
    hosts: tuple[str, ...]
    """Hosts of the last committed generation's members."""
    is_move: bool = False
    """The coordinator has not been lost: it leaves its host, and `coordinator` is to take over now."""

    @property
    def candidates(self) -> tuple[GuardianInfo, ...]:
        """The first guardian of each host but the lost one, beginning with the next host."""
        hosts = list(dict.fromkeys(guardian.host for guardian in self.guardians))
        lost = hosts.index(self.coordinator.host) if self.coordinator.host in hosts else len(hosts)
        line = hosts[lost + 1 :] + hosts[:lost]
        members = set(self.hosts)
        return tuple(self._first[host] for host in line if host in members)[:MAX_CANDIDATES]

    def brief(self) -> FailoverPlan:
        """Returns what a guardian needs that is not a candidate: whom to try, and whether it is on the lost host."""
        guardians = {self.coordinator, *self.same_host_guardians[:1], *self.candidates}
        return FailoverPlan(
            coordinator=self.coordinator,
            guardians=tuple(guardian for guardian in self.guardians if guardian in guardians),
            hosts=tuple(host for host in self.hosts if any(host == guardian.host for guardian in guardians)),
            is_move=self.is_move,
        )

    def reached_hosts(self, guardians: Collection[tuple[int, ...]]) -> set[str]:
        """The hosts that count as reached by a coordinator to which these guardians, given by their ranks, connect.

        The first guardian of a host speaks for it: of several, some might connect to another side.
        """
        return {guardian.host for guardian in self._first.values() if guardian.ranks in guardians}

    @cached_property
    def _first(self) -> dict[str, GuardianInfo]:
        """The first guardian of each host."""
        return {guardian.host: guardian for guardian in reversed(self.guardians)}

    @property
    def surviving_guardians(self) -> tuple[GuardianInfo, ...]:
        """All guardians except those of the lost host."""
        return tuple(guardian for guardian in self.guardians if guardian.host != self.coordinator.host)

    @property
    def same_host_guardians(self) -> tuple[GuardianInfo, ...]:
        """The other guardians of the lost host, for the case that only the coordinator's process is lost."""
        return tuple(g for g in self.guardians if g.host == self.coordinator.host and g.ranks != self.coordinator.ranks)

    def to_json(self) -> dict[str, Any]:
        return {
            "coordinator": self.coordinator.to_json(),
            "guardians": [guardian.to_json() for guardian in self.guardians],
            "hosts": list(self.hosts),
            "is_move": self.is_move,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> FailoverPlan:
        return FailoverPlan(
            coordinator=GuardianInfo.from_json(data["coordinator"]),
            guardians=tuple(GuardianInfo.from_json(guardian) for guardian in data["guardians"]),
            hosts=tuple(data["hosts"]),
            is_move=data["is_move"],
        )


@dataclass(frozen=True, kw_only=True)
class QuorumCheck:
    """A decision whether this side may serve, and why not."""

    has_quorum: bool
    reason: str = ""


def check_quorum(reached: Collection[str], hosts: Collection[str], *, lock_witness: Callable[[], str]) -> QuorumCheck:
    """Decides for a side that reaches some of the last generation's `hosts`.

    `lock_witness` tries to lock the witness and returns why that fails, "" if this side holds it; it is called only if
    the witness decides.
    """
    count = len(set(reached) & set(hosts))
    summary = f"this side reaches {count} of {len(hosts)} hosts"
    if 2 * count > len(hosts):
        return QuorumCheck(has_quorum=True)
    if 2 * count < len(hosts):
        return QuorumCheck(
            has_quorum=False, reason=f"{summary}; it needs more than half, or half and the witness, to go on"
        )
    missing = lock_witness()
    return QuorumCheck(has_quorum=not missing, reason=missing and f"{summary}, and {missing}")
