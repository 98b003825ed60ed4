"""The membership protocol as a state machine: evidence in, actions out. Pure.

The coordinator feeds it what it hears (reports, confirmations, deaths, suspicions, departures) and carries out what it
returns. One change of membership::

    evidence ----> Seal      every live worker leaves its epoch; nothing of it moves any more
    report x all > Open      the record: who takes part, from which position, by whose cut the state is held
                   or Halt   a stage without replica, a range of optimizer state without a live holder
    confirm x all > Commit   everybody holds what it shall hold: only now may the old ranges be freed

Any further death begins again at Seal with the next number. Until Commit everything is decided by the last committed
epoch, by whose cut all workers still hold their ranges. The start of a run is epoch 0: all report with nothing in their
hands; no Seal announces it.

Why it is right, and which simpler rules are wrong, is shown by exhaustive exploration: tests/elastic/protocol_model.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel3d.elastic.membership import NOTHING, EpochRecord, Loss, Position, Report
from parallel3d.elastic.survival import Verdict, survivable
from parallel3d.errors import ProtocolError
from parallel3d.topology.grid import Grid

MAX_FRUITLESS_CHANGES = 8
"""So many changes in a row without a step in between end the run: what goes wrong each time is no accident."""


@dataclass(frozen=True, kw_only=True)
class Seal:
    """Tell these workers that their epoch is over and that they shall report to `epoch`."""

    ranks: tuple[int, ...]
    epoch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Open:
    """Send the record to its members."""

    record: EpochRecord


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Tell the members that all have confirmed; leavers among them are gone with that."""

    epoch: int
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Depart:
    """Tell this worker, which is to leave, to ask for a change at its next step boundary."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class Stay:
    """The run can't go on without this worker, which was asked to leave: the caller stops the run instead.

    A Depart that the worker had before is void.
    """

    rank: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Halt:
    """The run can't go on."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Release:
    """Everybody is done: these workers may end."""

    ranks: tuple[int, ...]


Action = Seal | Open | Commit | Depart | Stay | Halt | Release


class Protocol:
    """The coordinator's decisions. Attributes are replaced, never changed in place: copy.copy is a snapshot."""

    def __init__(self, grid: Grid, *, zero_stage: int, zero_backups: int, enabled: bool = True):
        self.live: frozenset[int] = frozenset(grid.ranks)
        self.committed: EpochRecord | None = None
        """The record of the last committed epoch."""
        self.evicted: tuple[Loss, ...] = ()
        """Who was lost since then."""
        self.num_changes = 0
        """Committed epochs after the first."""
        self.over = False
        """True after Halt or Release: nothing happens any more."""
        self.last_told = 0
        """The last step of which the run's report has heard; the caller sets it, the next record carries it."""
        self._grid = grid
        """By whose cut the workers hold their ranges: the committed one's, at first the full one."""
        self._zero_stage = zero_stage
        self._zero_backups = zero_backups
        self._enabled = enabled
        self._epoch = 0
        """The newest number, committed or pending."""
        self._reasons: tuple[str, ...] = ()
        """Why the membership has changed since the last committed epoch."""
        self._hosts: Mapping[int, str] = {}
        self._reports: Mapping[int, Report] = {}
        self._record: EpochRecord | None = None
        """Opened, not yet confirmed by all."""
        self._digests: Mapping[int, str] = {}
        self._leaving: frozenset[int] = frozenset()
        self._finished: frozenset[int] = frozenset()
        self._newest = Position()
        self._num_fruitless = 0

    @property
    def pending(self) -> int | None:
        """The number of the change under way; None while an epoch is running."""
        return None if self.committed is not None and self.committed.epoch == self._epoch else self._epoch

    def report(self, report: Report) -> list[Action]:
        """A worker has sealed; the last one's report decides."""
        if not self._heeds(report.rank, report.epoch):
            return []
        if self.pending is None or report.rank in self._reports:
            raise ProtocolError(f"rank {report.rank} reported twice to epoch {report.epoch}")
        self._reports = {**self._reports, report.rank: report}
        self._hosts = {**self._hosts, report.rank: report.host}
        return self._decide() if self._reports.keys() == self.live else []

    def confirm(self, rank: int, epoch: int, digest: str) -> list[Action]:
        """A member holds what it shall hold; the last one's word commits the epoch."""
        if not self._heeds(rank, epoch):
            return []
        if self._record is None or rank in self._digests:
            raise ProtocolError(f"rank {rank} confirmed epoch {epoch}, which it was not asked to")
        self._digests = {**self._digests, rank: digest}
        if self._digests.keys() != set(self._record.members):
            return []
        first, *others = self._record.grid.ranks
        for other in others:
            if self._digests[other] != self._digests[first]:
                return self._halt(f"ranks {first} and {other} made different plans for epoch {epoch}")
        return self._commit(self._record)

    def lose(self, losses: Sequence[Loss]) -> list[Action]:
        """Workers are dead; those already gone are ignored."""
        new = {loss.rank: loss for loss in losses if loss.rank in self.live}
        if not new or self.over:
            return []
        self.live -= set(new)
        self._leaving -= set(new)
        self.evicted += tuple(new.values())
        reason = "; ".join(f"lost rank {loss.rank}: {loss.why}" for loss in new.values())
        if not self._enabled:
            return self._halt(f"{reason} (elastic.enabled is false)")
        verdict = self._can_go_on()
        return self._begin(reason) if verdict.can_continue else self._halt(verdict.reason)

    def suspect(self, rank: int, epoch: int, reason: str) -> list[Action]:
        """A worker has left `epoch` for a reason that only it has seen: a change, if need be with the same members."""
        if not self._heeds(rank, epoch):
            return []
        if self.pending is not None:
            self._num_fruitless += 1
        return self._begin(f"rank {rank}: {reason}")

    def ask_to_leave(self, rank: int) -> list[Action]:
        """An announced departure."""
        if rank not in self.live or rank in self._leaving or self.over:
            return []
        if not self._enabled:
            return [Stay(rank=rank, reason="elastic.enabled is false")]
        verdict = self._can_go_on(leaving=self._leaving | {rank})
        if not verdict.can_continue:
            return [Stay(rank=rank, reason=verdict.reason)]
        self._leaving |= {rank}
        return self._send_off_spares() or [Depart(rank=rank)]

    def finish(self, rank: int, epoch: int) -> list[Action]:
        """A worker of the grid has made its last step; nobody ends before all have."""
        if not self._heeds(rank, epoch):
            return []
        if self.pending is not None:
            raise ProtocolError(f"rank {rank} finished in epoch {epoch}, which has not begun")
        self._finished |= {rank}
        if not self._finished.issuperset(self._grid.ranks):
            return []
        self.over = True
        return [Release(ranks=tuple(sorted(self.live)))]

    def _heeds(self, rank: int, epoch: int) -> bool:
        """False for words of the dead and of older epochs, which may still arrive."""
        if epoch > self._epoch:
            raise ProtocolError(f"rank {rank} speaks of epoch {epoch}, the newest is {self._epoch}")
        return epoch == self._epoch and rank in self.live and not self.over

    def _begin(self, reason: str) -> list[Action]:
        self._epoch += 1
        self._reasons += (reason,)
        self._reports, self._record, self._digests, self._finished = {}, None, {}, frozenset()
        return [Seal(ranks=tuple(sorted(self.live)), epoch=self._epoch, reason=reason)]

    def _decide(self) -> list[Action]:
        """All live workers have reported."""
        lead = self._find_newest()
        if lead.position > self._newest:
            self._newest, self._num_fruitless = lead.position, 0
        elif self._num_fruitless >= MAX_FRUITLESS_CHANGES:
            return self._halt(f"{self._num_fruitless} changes of membership without a step: {self._reasons[-1]}")
        leavers, stays = self._grant_departures()
        grid, _ = self._grid.without(self._dead | leavers)
        self._record = EpochRecord(
            epoch=self._epoch,
            grid=grid,
            previous=None if self.committed is None else self._grid,
            members=tuple(sorted(self.live)),
            leavers=tuple(sorted(leavers)),
            evicted=self.evicted,
            position=lead.position,
            entries=lead.entries,
            weights_whole=all(
                self._reports[rank].weights_whole and self._reports[rank].position.iteration == lead.position.iteration
                for rank in grid.ranks
            ),
            hosts=self._hosts,
            addresses={rank: self._reports[rank].address for rank in sorted(self._reports)},
            last_told=self.last_told,
            reason="; ".join(self._reasons),
        )
        return [*stays, Open(record=self._record)]

    def _find_newest(self) -> Report:
        """The report of a worker that holds the newest entry; ProtocolError when what they say can't be.

        Spares are not asked: they have taken part in no all-reduce since they lost their place.
        """
        cut_epoch = NOTHING if self.committed is None else self.committed.epoch
        for report in self._reports.values():
            if report.cut_epoch != cut_epoch:
                raise ProtocolError(
                    f"rank {report.rank} holds the ranges of epoch {report.cut_epoch}; committed is {cut_epoch}"
                )
        reports = [self._reports[rank] for rank in self._grid.ranks if rank in self._reports]
        newest = max(reports, key=lambda report: (report.position, -report.rank))
        oldest = min(reports, key=lambda report: (report.position, report.rank))
        behind = newest.position.iteration - oldest.position.iteration
        if behind > 1 or len({report.position for report in reports}) > 2:
            raise ProtocolError(
                f"rank {oldest.rank} at {oldest.position} is more than one entry behind rank {newest.rank} "
                f"at {newest.position}"
            )
        return newest

    def _grant_departures(self) -> tuple[frozenset[int], list[Stay]]:
        """Who leaves with this change, and who has to stay, since others were lost after it had been asked to leave."""
        leavers: frozenset[int] = frozenset()
        stays = []
        for rank in sorted(self._leaving):
            verdict = self._can_go_on(leaving=leavers | {rank})
            if verdict.can_continue:
                leavers |= {rank}
            else:
                stays.append(Stay(rank=rank, reason=verdict.reason))
        self._leaving = leavers
        return leavers, stays

    def _commit(self, record: EpochRecord) -> list[Action]:
        if self.committed is not None:
            self.num_changes += 1
            self._num_fruitless += 1
        self.committed, self._grid = record, record.grid
        self.live -= set(record.leavers)
        self._leaving -= set(record.leavers)
        self._reports, self._record, self._digests = {}, None, {}
        self.evicted, self._reasons = (), ()
        return [Commit(epoch=record.epoch, members=record.members), *self._send_off_spares()]

    def _send_off_spares(self) -> list[Action]:
        """A spare has no step boundary at which it could ask for the change with which it leaves."""
        spares = sorted(rank for rank in self._leaving if not self._grid.holds(rank))
        if not spares or self.pending is not None:
            return []
        return self._begin("; ".join(f"rank {rank} leaves" for rank in spares))

    def _halt(self, reason: str) -> list[Action]:
        self.over = True
        return [Halt(reason=reason)]

    @property
    def _dead(self) -> frozenset[int]:
        return frozenset(self._grid.ranks) - self.live

    def _can_go_on(self, leaving: frozenset[int] = frozenset()) -> Verdict:
        return survivable(
            self._grid,
            zero_stage=self._zero_stage,
            zero_backups=self._zero_backups,
            hosts={} if self.committed is None else self.committed.hosts,
            dead=self._dead,
            leaving=leaving,
            fresh=self.committed is None,
        )
