"""One rank's way from one membership epoch into the next: seal, report, resolve, re-cut, confirm, regroup.

    leave_epoch     abort what is under way, finish a local update: the position is fixed           (seal)
    enter_epoch     report; with the record:
                      take the entry that somebody holds and this rank lacks, apply its update      (resolve)
                      build the new ranges of optimizer state beside the old ones                   (re-cut)
                      tell that they are there, wait until everybody's are                          (confirm)
                      free the old ranges, make new groups, gather the weights                      (regroup)

It begins again whenever a further loss ends the epoch before it is in force; until then everything goes by the old cut.
The start of a run is the same with nothing in hand.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from parallel3d.comm.abort import AbortToken
from parallel3d.comm.aside import run_aside
from parallel3d.comm.group import Group
from parallel3d.comm.messages import Links
from parallel3d.elastic.membership import NOTHING, Address, EpochRecord, Position, Report
from parallel3d.elastic.seat import Opening, Seat
from parallel3d.errors import EpochEnded
from parallel3d.optim.zero1 import CutChange
from parallel3d.topology.groups import Groups
from parallel3d.trainer.build import Plans, RankRuntime, Transports
from parallel3d.trainer.entry import entry_from_json


class Network(ABC):
    """Makes a rank's transports, epoch by epoch."""

    @abstractmethod
    def listen(self, epoch: int) -> Address:
        """Opens what the other ranks reach this one by in that epoch; an earlier one that was not used is closed."""

    @abstractmethod
    def transports(self, record: EpochRecord, token: AbortToken) -> Transports:
        """The links at once; groups are made when they are asked for."""


class Member:
    """Takes `rank` through the epochs of a run."""

    def __init__(
        self, rank: RankRuntime, seat: Seat, network: Network, *, host: str, publish: Callable[[dict[str, Any]], None]
    ):
        self.rank = rank
        self.record: EpochRecord | None = None
        """Of the newest committed epoch."""
        self._seat = seat
        self._network = network
        self._host = host
        self._publish = publish
        self._token = AbortToken()
        self._abandoned: list[Groups[Group]] = []

    def enter_epoch(self, suspicion: str = "") -> bool:
        """Goes on until this rank has a place in an epoch that is in force; False: it shall end.

        `suspicion` says why the rank has left its epoch. A rank without a place waits here until it is needed.
        """
        while (opening := self._seat.enter(self._report, suspicion=suspicion)) is not None:
            try:
                if self._join(opening):
                    return True
                if self.rank.rank in opening.record.leavers:
                    return False
                suspicion = ""  # a spare waits for the next change
            except EpochEnded as error:
                suspicion = str(error)
            self.leave_epoch(suspicion)
        return False

    def leave_epoch(self, reason: str = "") -> None:
        """Fixes this rank's position: afterwards nothing of the epoch changes what it holds."""
        self._token.abort(reason or "this rank has left the epoch")
        if (groups := self.rank.leave()) is not None:
            groups.abandon()
            self._abandoned.append(groups)
        self.rank.optimizer.discard()
        if self.rank.state.entries:
            self.rank.optimizer.bring_to(self.rank.state.iteration, self.rank.update_step())

    def finish(self) -> None:
        """Waits until all are done; raises EpochEnded when somebody is lost before."""
        self._seat.finish()

    # --- the way in -----------------------------------------------------------------------------------------------

    def _report(self, epoch: int) -> Report:
        self.rank.probe("recovery_report")
        state = self.rank.state
        return Report(
            rank=self.rank.rank,
            epoch=epoch,
            cut_epoch=NOTHING if self.record is None else self.record.epoch,
            position=Position(iteration=state.iteration, evaluation=int(state.is_evaluated)),
            entries=tuple(entry.to_json() for entry in state.newest),
            version=state.iteration,
            weights_whole=self.rank.optimizer.is_whole,
            host=self._host,
            address=self._network.listen(epoch),
        )

    def _join(self, opening: Opening) -> bool:
        """Whether this rank has a place in the new epoch; raises EpochEnded when that ends before."""
        record, self._token = opening.record, opening.token
        self._resolve(record)
        transports = self._network.transports(record, opening.token)
        try:
            return self._join_with(record, transports)
        finally:
            if self.rank.parts is None:
                transports.links.close()

    def _join_with(self, record: EpochRecord, transports: Transports) -> bool:
        rank = self.rank
        has_place = record.grid.holds(rank.rank)
        building = run_aside(  # meanwhile state moves
            lambda: rank.build_groups(record.grid, record.epoch, transports) if has_place else None,
            "build-groups",
        )
        plans = Plans(rank.config, record.grid)
        try:
            self._move_state(record, transports.links, digest=lambda: rank.plan_next(plans).digest if has_place else "")
        except EpochEnded:
            building.add_done_callback(_close_unused)
            raise
        started = time.perf_counter()
        self._commit(record)
        with self._token.waiting():
            groups = building.result()  # bounded: it ends with the epoch
        if groups is None:
            return False
        rank.probe("recovery_groups")
        rank.join(record.epoch, groups, plans, transports)
        if not record.weights_whole:
            rank.optimizer.gather()
        if rank.is_leader:
            regroup_s = time.perf_counter() - started
            self._publish(
                {"kind": "resumed", "epoch": record.epoch, "regroup_s": regroup_s, "plan": rank.train_plan.reason}
            )
        return True

    def _move_state(self, record: EpochRecord, links: Links, *, digest: Callable[[], str]) -> None:
        """Builds the new cut's ranges beside the old ones; returns when everybody has, raises EpochEnded when not."""
        rank = self.rank
        rank.probe("recovery_moves")
        moved_bytes = rank.optimizer.recut(
            CutChange(
                epoch=record.epoch,
                old=None if record.previous is None else rank.cuts_on(record.previous, record.hosts),
                new=rank.cuts_on(record.grid, record.hosts),
                live=record.members,
                weights_whole=record.weights_whole,
            ),
            links,
        )
        rank.probe("recovery_confirm")
        self._seat.confirm(record.epoch, digest=digest(), moved_bytes=moved_bytes)

    def _resolve(self, record: EpochRecord) -> None:
        """Takes the newest entry that anybody holds. Its gradients are here: who holds it proves that all had them.

        A spare has stood still since it lost its place: entries are nothing to it.
        """
        if record.previous is None or not record.previous.holds(self.rank.rank):
            return
        for data in record.entries:
            self.rank.state = self.rank.state.fold(entry_from_json(data))
        if self.rank.state.entries:
            self.rank.optimizer.bring_to(self.rank.state.iteration, self.rank.update_step())

    def _commit(self, record: EpochRecord) -> None:
        if any(groups.is_busy for groups in self._abandoned):
            self.rank.optimizer.renew_buffers()
        for groups in self._abandoned:
            groups.close()
        self._abandoned = []
        self.rank.optimizer.commit()
        self.record = record


def _close_unused(building: Future[Groups[Group] | None]) -> None:
    """Gives groups back that were built for an epoch which never came into force."""
    if building.exception() is None and (groups := building.result()) is not None:  # bounded: it is done
        groups.close()
