"""The events of the model checker's worlds, as calls of the membership protocol."""

from __future__ import annotations

from collections.abc import Mapping

from parallel3d.elastic.protocol.actions import Action
from parallel3d.elastic.protocol.membership import LogPosition, LostWorker, StateReport, digest_entries
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from tests.support.protocol_world import Frame


def feed(protocol: MembershipProtocol, event: Frame, hosts: Mapping[int, str]) -> list[Action]:
    """Feeds one event to the protocol; returns its actions."""
    match event:
        case ("report", rank, generation, state_generation, position, version):
            return protocol.report(
                StateReport(
                    rank=rank,
                    generation=generation,
                    state_generation=state_generation,
                    position=LogPosition(iteration=position),
                    digest=digest_entries(str(position).encode()),
                    version=version,
                    host=hosts.get(rank, ""),
                )
            )
        case ("entries", rank, generation, position):
            return protocol.entries(rank, generation, str(position).encode())
        case ("confirm", rank, generation):
            return protocol.confirm(rank, generation, "the same plan")
        case ("on_lost", rank):
            return protocol.on_lost([LostWorker(rank=rank, why="killed")])
        case ("lost_together", ranks):
            return protocol.on_lost([LostWorker(rank=rank, why="killed") for rank in ranks])
        case ("begin",):
            return protocol._begin("the coordinator is lost")
        case ("suspect", rank, generation):
            return protocol.suspect(rank, generation, "a peer is gone")
        case ("admit", rank, part):
            return protocol.admit(rank, part, hosts.get(rank, ""))
        case ("release", rank):
            protocol.release(rank)
            return []
        case ("announce_drain", rank):
            return protocol.announce_drain(rank)
        case ("finish", rank, generation):
            return protocol.finish(rank, generation)
    raise AssertionError(event)
