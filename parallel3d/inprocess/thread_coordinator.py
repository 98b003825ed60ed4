"""The coordinator of ranks that are threads: the protocol and membership clients of processes, without sockets.

Deaths are injected (RankDied). All waits go through the world's one condition, so that a recovery that hangs is
reported as a deadlock at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from parallel3d.config.schema import Config
from parallel3d.elastic.protocol.actions import (
    AbortGeneration,
    Action,
    ChangeRequest,
    Commit,
    DrainRefused,
    DrainRequest,
    FetchEntries,
    FinishRun,
    Propose,
    StopRun,
)
from parallel3d.elastic.protocol.membership import GenerationRecord, LostWorker, StateReport
from parallel3d.elastic.protocol.record_delta import record_frame
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.elastic.worker.membership_client import MembershipClient, Send
from parallel3d.errors import RunEnded
from parallel3d.inprocess.world import ThreadWorld
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import PartId
from parallel3d.trainer.plans import build_grid, build_target


class ThreadMembershipClient(MembershipClient):
    """A membership client that waits through the world."""

    def __init__(self, world: ThreadWorld, *, rank: int, send: Send, run_token: AbortToken, joins: bool):
        super().__init__(rank=rank, send=send, run_token=run_token, joins=joins)
        self._world = world

    def _await(self, ready: Callable[[], bool]) -> None:
        over = self._run_token
        self._world.wait(
            self.rank,
            lambda: ready() or over.aborted,
            lambda: f"for the coordinator (generation {self._newest_generation})",
            token=AbortToken(),
        )
        if not ready():
            raise RunEnded(over.reason)


class ThreadCoordinator:
    """Serves the ranks of `world`, each through its membership client."""

    def __init__(self, world: ThreadWorld, config: Config):
        world.tolerates_deaths = True
        grid = build_grid(config)
        self.protocol = MembershipProtocol(
            grid,
            zero_stage=config.parallel.zero_stage,
            zero_backups=config.elastic.zero_backups,
            target=build_target(config),
        )
        self.run_token = AbortToken()
        self.draining: set[int] = set()
        """Ranks that should leave at their next step boundary."""
        self.building: dict[int, PartId] = {}
        """The parts that workers build which are not in the run."""
        self.on_settled: Callable[[], None] = lambda: None
        """Called with the lock, whenever no change of membership is under way."""
        self.moved_bytes = 0
        self._proposed: GenerationRecord | None = None
        """The newest proposed record."""
        self.abort_reason = ""
        """Why the run could not go on, or ""."""
        self.memberships = {
            rank: ThreadMembershipClient(
                world,
                rank=rank,
                send=partial(self._on_message, rank),
                run_token=self.run_token,
                joins=not grid.holds(rank),
            )
            for rank in range(world.num_ranks)
        }
        self._world = world

    def on_lost(self, rank: int, why: str) -> None:
        self._world.run_locked(lambda: self._execute(self.protocol.on_lost([LostWorker(rank=rank, why=why)])))

    def announce_drain(self, rank: int) -> None:
        self._world.run_locked(lambda: self._execute(self.protocol.announce_drain(rank)))

    def drain(self, ranks: Collection[int]) -> bool:
        """Has workers leave that are slow; False if they leave already, or the run needs them."""

        def begin() -> bool:
            may_leave = self.protocol.stays(ranks) and self.protocol.check_drain(ranks).can_continue
            self._execute(self.protocol.drain(ranks) if may_leave else [])
            return may_leave

        return self._world.run_locked(begin)

    def move(self, rank: int, part: PartId) -> None:
        """Has a spare build `part` instead of its own; call it with the lock."""
        self.protocol.release(rank)
        self.building[rank] = part
        self._send_to_ranks([rank], {"op": "build_part", "part": list(part)})

    def _on_message(self, rank: int, frame: dict[str, Any], payload: bytes = b"") -> None:
        self._world.run_locked(lambda: self._execute(self._ask_protocol(rank, frame, payload)))

    def _ask_protocol(self, rank: int, frame: dict[str, Any], payload: bytes) -> list[Action]:
        match frame:
            case {"op": "report", "report": report}:
                return self.protocol.report(StateReport.from_json(report))
            case {"op": "entries", "generation": generation}:
                return self.protocol.entries(rank, generation, payload)
            case {"op": "request_record", "generation": generation}:
                self._send_whole_record(rank, generation)
                return []
            case {"op": "confirm", "generation": generation, "digest": digest, "moved_bytes": moved_bytes}:
                self.moved_bytes += moved_bytes
                return self.protocol.confirm(rank, generation, digest)
            case {"op": "suspect", "generation": generation, "reason": reason}:
                return self.protocol.suspect(rank, generation, reason)
            case {"op": "finish_generation", "generation": generation}:
                return self.protocol.finish(rank, generation)
            case {"op": "ready"}:
                return self.protocol.admit(rank, self.building.pop(rank), "")
        raise AssertionError(frame)

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case AbortGeneration(ranks=ranks, generation=generation, reason=reason):
                    self._send_to_ranks(ranks, {"op": "abort_generation", "generation": generation, "reason": reason})
                case FetchEntries(rank=rank, generation=generation):
                    self._send_to_ranks([rank], {"op": "fetch_entries", "generation": generation})
                case ChangeRequest(rank=rank, generation=generation):
                    self._send_to_ranks([rank], {"op": "change_request", "generation": generation})
                case Propose(record=record, base=base, behind=behind, entries=entries):
                    self._proposed = record
                    self._send_to_ranks(behind, {"op": "entries", "generation": record.generation}, entries)
                    self._send_to_ranks(record.members, *record_frame(record, base))
                case Commit(generation=generation, members=members):
                    self._send_to_ranks(members, {"op": "commit", "generation": generation})
                case DrainRequest(rank=rank):
                    self.draining.add(rank)
                case FinishRun(ranks=ranks):
                    self._send_to_ranks([*ranks, *self.building], {"op": "finish_run"})
                case StopRun(reason=reason) | DrainRefused(reason=reason):
                    self.abort_reason = reason
                    self.run_token.abort(reason)
        if self.protocol.pending is None and not self.protocol.over:
            self.on_settled()

    def _send_whole_record(self, rank: int, generation: int) -> None:
        """Answers a worker that lacks the record from which the proposed one is the difference."""
        if self._proposed is not None and self._proposed.generation == generation:
            self._send_to_ranks([rank], *record_frame(self._proposed, None))

    def _send_to_ranks(self, ranks: Iterable[int], frame: dict[str, Any], payload: bytes = b"") -> None:
        for rank in ranks:
            self.memberships[rank].handle(frame, payload)
