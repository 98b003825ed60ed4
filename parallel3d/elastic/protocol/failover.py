"""Who serves when the coordinator's host is lost, and whether it may. Pure, but for the witness' lock.

After every committed generation the coordinator sends all guardians the roster. When their links to it break, the
guardians of the other hosts turn to the heirs, one for each host, in the roster's order, beginning behind the host that
is lost; the first that answers musters who can be reached. It serves when these are more than half of the hosts of the
last generation, or half of them and it holds the witness: the other side, if it is alive at all, can have neither. A
coordinator that has lost its connection to more than half of the hosts stops, for the same reason.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from parallel3d.elastic.protocol.membership import Address
from parallel3d.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class GuardianInfo:
    """One guardian: whom it guards, and where it listens for the case that it is to serve."""

    ranks: tuple[int, ...]
    host: str
    address: Address

    def to_json(self) -> dict[str, Any]:
        return {"ranks": list(self.ranks), "host": self.host, "address": list(self.address)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> GuardianInfo:
        host, port = data["address"]
        return GuardianInfo(ranks=tuple(data["ranks"]), host=data["host"], address=(host, port))


@dataclass(frozen=True, kw_only=True)
class FailoverPlan:
    """What guardians must know when the coordinator is gone."""

    coordinator: GuardianInfo
    """The guardian in whose process it is."""
    guardians: tuple[GuardianInfo, ...]
    """By rank."""
    hosts: tuple[str, ...]
    """Those of the last committed generation's members."""

    @property
    def candidates(self) -> tuple[GuardianInfo, ...]:
        """The first guardian of each host but the lost one, beginning with the next host."""
        hosts = list(dict.fromkeys(guardian.host for guardian in self.guardians))
        lost = hosts.index(self.coordinator.host)
        line = hosts[lost + 1 :] + hosts[:lost]
        first = {guardian.host: guardian for guardian in reversed(self.guardians)}
        return tuple(first[host] for host in line if host in self.hosts)

    @property
    def surviving_guardians(self) -> tuple[GuardianInfo, ...]:
        """All guardians but those of the lost host."""
        return tuple(guardian for guardian in self.guardians if guardian.host != self.coordinator.host)

    @property
    def same_host_guardians(self) -> tuple[GuardianInfo, ...]:
        """The other guardians of the lost host, in case that only the coordinator's process is lost."""
        return tuple(g for g in self.guardians if g.host == self.coordinator.host and g.ranks != self.coordinator.ranks)

    def to_json(self) -> dict[str, Any]:
        return {
            "coordinator": self.coordinator.to_json(),
            "guardians": [guardian.to_json() for guardian in self.guardians],
            "hosts": list(self.hosts),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> FailoverPlan:
        return FailoverPlan(
            coordinator=GuardianInfo.from_json(data["coordinator"]),
            guardians=tuple(GuardianInfo.from_json(guardian) for guardian in data["guardians"]),
            hosts=tuple(data["hosts"]),
        )


@dataclass(frozen=True, kw_only=True)
class QuorumCheck:
    """Whether a side may serve, and why not."""

    has_quorum: bool
    reason: str = ""


def check_quorum(reached: Collection[str], hosts: Collection[str], *, lock_witness: Callable[[], str]) -> QuorumCheck:
    """The rule for a side that reaches some of the last generation's `hosts`.

    `lock_witness` tries to lock the witness and returns why that fails, "" when this side holds it; it is asked only
    when it decides.
    """
    count = len(set(reached) & set(hosts))
    summary = f"this side reaches {count} of {len(hosts)} hosts"
    if 2 * count > len(hosts):
        return QuorumCheck(has_quorum=True)
    if 2 * count < len(hosts):
        return QuorumCheck(
            has_quorum=False, reason=f"{summary}; it takes more than half, or half and the witness, to go on"
        )
    missing = lock_witness()
    return QuorumCheck(has_quorum=not missing, reason=missing and f"{summary}, and {missing}")


class Witness:
    """A lock on a file that all hosts see: held by whoever serves, as long as its process lives."""

    def __init__(self, path: str | None):
        self._path = Path(path) if path is not None else None
        self._file: IO[str] | None = None

    def try_lock(self) -> str:
        """Tries to lock it; returns "" when this process holds it, else why not."""
        if self._path is None:
            return "there is no witness (elastic.witness)"
        try:
            self._file = self._file or self._path.open("a")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"the witness {self._path} is held by another side"
        except OSError as error:
            return f"the witness {self._path} can't be locked ({error.strerror})"
        return ""

    def lock_at_start(self) -> None:
        """For the coordinator that begins a run; raises LaunchError when it can't have it."""
        if self._path is not None and (missing := self.try_lock()):
            raise LaunchError(f"{missing}: set elastic.witness to a file of this run alone, where all hosts see it")
