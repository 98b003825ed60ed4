"""The coordinator of a world of threads: the same protocol and the same seats as in processes, without sockets.

Deaths are injected (RankDied); everything that waits, waits with the world's one condition, so that a recovery that
hangs is reported as a deadlock at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from parallel3d.comm.abort import AbortToken
from parallel3d.elastic.membership import Loss, Report
from parallel3d.elastic.protocol import Action, Commit, Depart, Halt, Open, Protocol, Release, Seal, Stay
from parallel3d.elastic.seat_control import ControlSeat
from parallel3d.errors import RunEnded
from parallel3d.testing.threads import ThreadWorld
from parallel3d.topology.grid import Grid


class ThreadSeat(ControlSeat):
    """A seat whose waits are known to the world."""

    def __init__(self, world: ThreadWorld, *, rank: int, send: Callable[[dict[str, Any]], None], run_token: AbortToken):
        super().__init__(rank=rank, send=send, run_token=run_token)
        self._world = world

    def _await(self, ready: Callable[[], bool]) -> None:
        over = self._run_token
        self._world.wait(
            self.rank,
            lambda: ready() or over.aborted,
            lambda: f"for the coordinator (epoch {self._announced})",
            token=AbortToken(),
        )
        if not ready():
            raise RunEnded(over.reason)


class ThreadTable:
    """Serves the ranks of `world`, each through its seat."""

    def __init__(self, world: ThreadWorld, grid: Grid, *, zero_stage: int, zero_backups: int):
        world.survives = True
        self.protocol = Protocol(grid, zero_stage=zero_stage, zero_backups=zero_backups)
        self.run_token = AbortToken()
        self.departing: set[int] = set()
        """Ranks that were told to leave at their next boundary."""
        self.moved_bytes = 0
        self.halted = ""
        """Why the run could not go on, if so."""
        self.seats = {
            rank: ThreadSeat(world, rank=rank, send=partial(self._hear, rank), run_token=self.run_token)
            for rank in grid.ranks
        }
        self._world = world

    def lose(self, rank: int, why: str) -> None:
        self._world.change(lambda: self._act(self.protocol.lose([Loss(rank=rank, why=why)])))

    def ask_to_leave(self, rank: int) -> None:
        self._world.change(lambda: self._act(self.protocol.ask_to_leave(rank)))

    def _hear(self, rank: int, frame: dict[str, Any]) -> None:
        self._world.change(lambda: self._act(self._ask_protocol(rank, frame)))

    def _ask_protocol(self, rank: int, frame: dict[str, Any]) -> list[Action]:
        match frame:
            case {"op": "report", "report": report}:
                return self.protocol.report(Report.from_json(report))
            case {"op": "confirm", "epoch": epoch, "digest": digest, "moved_bytes": moved_bytes}:
                self.moved_bytes += moved_bytes
                return self.protocol.confirm(rank, epoch, digest)
            case {"op": "suspect", "epoch": epoch, "reason": reason}:
                return self.protocol.suspect(rank, epoch, reason)
            case {"op": "finish_epoch", "epoch": epoch}:
                return self.protocol.finish(rank, epoch)
        raise AssertionError(frame)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Seal(ranks=ranks, epoch=epoch, reason=reason):
                    self._tell(ranks, {"op": "seal", "epoch": epoch, "reason": reason})
                case Open(record=record):
                    self._tell(record.members, {"op": "record", "record": record.to_json()})
                case Commit(epoch=epoch, members=members):
                    self._tell(members, {"op": "go", "epoch": epoch})
                case Depart(rank=rank):
                    self.departing.add(rank)
                case Release(ranks=ranks):
                    self._tell(ranks, {"op": "release"})
                case Halt(reason=reason) | Stay(reason=reason):
                    self.halted = reason
                    self.run_token.abort(reason)

    def _tell(self, ranks: tuple[int, ...], frame: dict[str, Any]) -> None:
        for rank in ranks:
            self.seats[rank].heed(frame)
