"""Workers that join a run: guardians offer to start them, the coordinator says which part of the model each builds.

    guardian                               coordinator
    offer_worker(slot)     ------------>   keeps it until a part of the model is missing
                           <------------   start_worker(slot, rank, part): a number that no worker has had
    worker: hello(part)    ------------>
            ready          ------------>   admitted: it enters with the next change of membership

One that ends before it is a member, or is late, costs the run nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from parallel3d.elastic.coordinator.connection import Connection
from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.run_status import RunStatus
from parallel3d.elastic.protocol.actions import Action
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.errors import OutOfPlaceError
from parallel3d.parallel.grid import PartId


class WorkerJoins:
    """Offers, and workers on their way into the run, each of which has `build_s` seconds to build its part."""

    def __init__(self, server: ConnectionServer, status: RunStatus, *, build_s: float):
        self._server = server
        self._status = status
        self._build_s = build_s
        self._offers: list[tuple[Connection, int]] = []
        """Guardians and their slots, oldest first."""
        self._parts: dict[int, PartId] = {}
        """What all that ever joined have built."""
        self._building: dict[int, float] = {}
        """Those that have not said that they are ready: their deadlines."""
        self._seen: object = None
        """What the last decision about offers rested on."""

    def offer(self, guardian: Connection, slot: int) -> None:
        """Notes that a guardian could start a worker."""
        self._offers.append((guardian, slot))

    def accept(self, protocol: MembershipProtocol, now_s: float) -> None:
        """Has workers started for the parts that are missing, as far as there are offers."""
        self._building = {rank: due_s for rank, due_s in self._building.items() if not self._status.workers[rank].ended}
        seen = (protocol.num_changes, len(self._offers), len(self._building))
        if not self._offers or protocol.pending is not None or seen == self._seen:
            return
        self._offers = [offer for offer in self._offers if offer[0].is_open]
        while self._offers and (part := protocol.choose_part([self._parts[rank] for rank in self._building])):
            self._start(*self._offers.pop(0), part, now_s)
        self._seen = (protocol.num_changes, len(self._offers), len(self._building))

    def overdue(self, now_s: float) -> Mapping[int, str]:
        """Returns workers that have had enough time to build their parts, and why they must end, once."""
        late = [rank for rank, due_s in self._building.items() if now_s > due_s]
        for rank in late:
            del self._building[rank]
        return dict.fromkeys(late, f"not ready to join within {self._build_s:g} s")

    def add(self, rank: int, part: PartId, now_s: float) -> None:
        """Adds a worker that builds `part`."""
        self._parts[rank], self._building[rank] = part, now_s + self._build_s

    def admit(self, rank: int, protocol: MembershipProtocol) -> list[Action]:
        """Handles a worker that has built its part."""
        if rank not in self._parts:
            raise OutOfPlaceError(f"rank {rank} was not asked to join")
        if self._building.pop(rank, None) is None:  # it has said so before, to this coordinator or the one before
            return []
        return protocol.admit(rank, self._parts[rank], self._status.workers[rank].host)

    def is_joining(self, rank: int, protocol: MembershipProtocol) -> bool:
        """Whether this worker is on its way into the run: the run does not count on it."""
        return rank in self._parts and rank not in protocol.live and not self._status.workers[rank].ended

    def take_building(self) -> list[int]:
        """Returns and forgets the workers that will not be needed."""
        building, self._building, self._offers = sorted(self._building), {}, []
        return building

    def _start(self, guardian: Connection, slot: int, part: PartId, now_s: float) -> None:
        rank = max(self._status.workers) + 1
        self.add(rank, part, now_s)
        self._status.add_worker(rank, host=guardian.hello["host"], coordinates=describe_part(part))
        guardian.guarded_ranks += (rank,)
        self._server.send(guardian, {"op": "start_worker", "slot": slot, "rank": rank, "part": list(part)})


def describe_part(part: PartId) -> str:
    """For a worker that has no coordinates yet."""
    return f"new, pp{part[0]} tp{part[1]}"
