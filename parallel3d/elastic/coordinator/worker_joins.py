"""Workers that join a run: guardians offer to start them, the coordinator says which part of the model each builds.

    guardian                               coordinator
    offer_worker(slot)     ------------>   keeps it until a part of the model is missing
                           <------------   start_worker(slot, rank, part): a number that no worker has had
    worker: hello(part)    ------------>
            ready          ------------>   admitted: it enters with the next change of membership

A spare has a number and waits, so it needs no offer: it is sent `build_part`, and is taken first. So is a worker whose
replica has lost another one, if it can help elsewhere: it leaves the membership and comes back like a new one. One that
ends before it is a member, or is late, costs the run nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from parallel3d.elastic.coordinator.connection import Connection
from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.run_status import RunStatus
from parallel3d.elastic.protocol.actions import Action
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.errors import OutOfPlaceError
from parallel3d.parallel.grid import Grid, PartId


class WorkerJoins:
    """Offers, and workers on their way into the run, each of which has `build_s` seconds to build its part."""

    def __init__(self, server: ConnectionServer, status: RunStatus, first_grid: Grid, *, build_s: float):
        self._server = server
        self._status = status
        self._first_grid = first_grid
        self._build_s = build_s
        self._offers: list[tuple[Connection, int]] = []
        """Guardians and their slots, oldest first."""
        self._spares: set[int] = set()
        """Workers that wait until a part is missing."""
        self._parts: dict[int, PartId] = {}
        """What all that ever joined have built."""
        self._building: dict[int, float] = {}
        """Those that have not said that they are ready: their deadlines."""
        self._seen: object = None
        """What the last decision about offers rested on."""

    def offer(self, guardian: Connection, slot: int) -> None:
        """Notes that a guardian could start a worker."""
        self._offers.append((guardian, slot))

    def add_spare(self, rank: int) -> bool:
        """Notes a worker that waits to be needed; False if it was asked to join."""
        if rank in self._parts:
            return False
        self._spares.add(rank)
        return True

    def accept(self, protocol: MembershipProtocol, now_s: float) -> list[dict[str, Any]]:
        """Has workers built or started for the parts that are missing, as far as there are any; returns records of
        moves."""
        workers = self._status.workers
        self._building = {rank: due_s for rank, due_s in self._building.items() if not workers[rank].ended}
        self._spares = {rank for rank in self._spares if not workers[rank].ended}
        if protocol.pending is not None or protocol.over or self._state(protocol) == self._seen:
            return []
        self._offers = [offer for offer in self._offers if offer[0].is_open]
        while self._offers or self._spares:
            spare = min(self._spares, default=None)
            host = self._offers[0][0].hello["host"] if spare is None else workers[spare].host
            part = protocol.choose_part(self._built(), self._hosts(), host=host)
            if part is None:
                break
            if spare is None:
                self._start(*self._offers.pop(0), part, now_s)
            else:
                self._take(spare, part, now_s)
        records = self._move_spares(protocol, now_s)
        self._seen = self._state(protocol)
        return records

    def overdue(self, now_s: float) -> Mapping[int, str]:
        """Returns workers that have had enough time to build their parts, and why they must end, once."""
        late = [rank for rank, due_s in self._building.items() if now_s > due_s]
        for rank in late:
            del self._building[rank]
        return dict.fromkeys(late, f"not ready to join within {self._build_s:g} s")

    def add(self, rank: int, part: PartId, now_s: float) -> None:
        """Adds a worker that builds `part`."""
        self._parts[rank], self._building[rank] = part, now_s + self._build_s

    def resume(self, rank: int, part: PartId, now_s: float) -> bool:
        """Adds a worker that another coordinator has asked for `part`; False if this one has."""
        if rank in self._parts:
            return False
        self.add(rank, part, now_s)
        return True

    def admit(self, rank: int, protocol: MembershipProtocol) -> list[Action]:
        """Handles a worker that has built its part."""
        if rank not in self._parts:
            raise OutOfPlaceError(f"rank {rank} was not asked to join")
        if self._building.pop(rank, None) is None:  # it has said so before, to this coordinator or the one before
            return []
        return protocol.admit(rank, self._parts[rank], self._status.workers[rank].host)

    def is_joining(self, rank: int, protocol: MembershipProtocol) -> bool:
        """Whether this worker is on its way into the run: the run does not count on it."""
        is_first = self._first_grid.holds(rank) and rank not in self._parts
        return not (is_first or rank in protocol.live or self._status.workers[rank].ended)

    def is_waiting(self, rank: int) -> bool:
        """Whether this worker is a spare, or builds its part."""
        return rank in self._spares or rank in self._building

    def dismiss(self, ranks: Iterable[int]) -> None:
        """Forgets workers that leave."""
        for rank in ranks:
            self._spares.discard(rank)
            self._building.pop(rank, None)

    def withdraw(self, host: str) -> None:
        """Forgets the offers of a host that is to become empty."""
        self._offers = [offer for offer in self._offers if offer[0].hello["host"] != host]

    def take_spares(self) -> list[int]:
        """Returns and forgets the spares."""
        spares, self._spares = sorted(self._spares), set()
        return spares

    def take_building(self) -> list[int]:
        """Returns and forgets the workers that will not be needed."""
        building, self._building, self._offers = sorted(self._building), {}, []
        return building

    def _state(self, protocol: MembershipProtocol) -> tuple[int, int, int, int]:
        """Returns all that a decision about joins rests on."""
        return protocol.num_changes, len(self._offers), len(self._spares), len(self._building)

    def _built(self) -> dict[int, PartId]:
        """The parts of those that have not said that they are ready."""
        return {rank: self._parts[rank] for rank in self._building}

    def _hosts(self) -> dict[int, str]:
        return {rank: self._status.workers[rank].host for rank in self._building}

    def _move_spares(self, protocol: MembershipProtocol, now_s: float) -> list[dict[str, Any]]:
        """Has members without coordinates build other parts, where that makes replicas whole; returns the records."""
        records = []
        while moves := protocol.choose_moves(self._built(), self._hosts()):
            for rank, part in moves.items():
                target = f"pp{part[0]} tp{part[1]}"
                text = f"{self._status.name(rank)}, now a spare, moves: it builds {target}"
                before = self._status.workers[rank].coordinates
                records.append({"kind": "move", "text": text, "rank": rank, "coordinates": before, "part": target})
                protocol.release(rank)
                self._take(rank, part, now_s)
        return records

    def _take(self, rank: int, part: PartId, now_s: float) -> None:
        self._spares.discard(rank)
        self.add(rank, part, now_s)
        self._status.workers[rank].coordinates = describe_part(part)
        self._server.send_to_workers([rank], {"op": "build_part", "part": list(part)})

    def _start(self, guardian: Connection, slot: int, part: PartId, now_s: float) -> None:
        rank = self._status.take_number()
        self.add(rank, part, now_s)
        self._status.add_worker(rank, host=guardian.hello["host"], coordinates=describe_part(part))
        guardian.guarded_ranks += (rank,)
        self._server.send(guardian, {"op": "start_worker", "slot": slot, "rank": rank, "part": list(part)})


def describe_part(part: PartId) -> str:
    """For a worker that has no coordinates yet."""
    return f"new, pp{part[0]} tp{part[1]}"
