"""Takes one rank from one membership generation into the next.

    leave_generation   seal      abort what is in flight, finish the local update: the rank's position is fixed
    enter_generation   report    the position, and the newest entries
                       resolve   apply the entry that another rank holds and this one lacks, and its update
                       share     send the train state to ranks that join (joining.py)
                       reshard   build the new ranges of optimizer state next to the old ones
                       confirm   wait until all ranks have theirs
                       regroup   free the old ranges, create new groups, gather the weights

A further loss before the commit starts this over; until then the old ranges stay valid. The start of a run is the same,
with no old ranges.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from parallel3d.elastic.protocol.membership import (
    NO_GENERATION,
    Address,
    GenerationRecord,
    LogPosition,
    StateReport,
    digest_entries,
)
from parallel3d.elastic.worker.membership_client import MembershipClient, PendingGeneration
from parallel3d.errors import GenerationEnded
from parallel3d.optim.reshard import ReshardPlan
from parallel3d.optim.shard_map import ShardMaps
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.background import run_in_background
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.group import Group
from parallel3d.parallel.groups import Groups
from parallel3d.parallel.p2p_messages import Links
from parallel3d.trainer.context import RankContext, Transports
from parallel3d.trainer.entry_codec import decode_entries, encode_entries
from parallel3d.trainer.generation import build_rank_groups, join_generation, leave_generation, shard_maps_of
from parallel3d.trainer.joining import share_train_state
from parallel3d.trainer.planned_losses import PlannedLosses
from parallel3d.trainer.plans import Plans


class Network(ABC):
    """Creates a rank's transports for each generation."""

    @abstractmethod
    def listen(self, generation: int) -> Address:
        """Opens the address at which other ranks reach this one in that generation; closes an unused earlier one."""

    @abstractmethod
    def transports(self, record: GenerationRecord, token: AbortToken, former: Sequence[Group] = ()) -> Transports:
        """Opens the links; groups are created on demand, or taken from those that this rank has left."""


class RecoveryManager:
    """Takes `rank` through the generations of a run."""

    def __init__(
        self,
        rank: RankContext,
        membership: MembershipClient,
        network: Network,
        *,
        host: str,
        publish: Callable[[dict[str, Any]], None],
    ):
        self.rank = rank
        self.record: GenerationRecord | None = None
        """Record of the newest committed generation."""
        self._membership = membership
        self._network = network
        self._host = host
        self._publish = publish
        self._token = AbortToken()
        self._abandoned: list[Groups[Group]] = []
        self._planned = PlannedLosses(rank.config)

    def enter_generation(self, suspicion: str = "") -> bool:
        """Returns True once this rank is part of a committed generation, False when it should exit.

        `suspicion` says why the rank left its last generation. A spare waits in here until it is needed.
        """
        while (pending := self._membership.next_generation(self._report, suspicion=suspicion)) is not None:
            try:
                if self._join(pending):
                    return True
                if self.rank.rank in pending.record.draining:
                    return False
                suspicion = ""  # a spare waits for the next change
            except GenerationEnded as error:
                suspicion = str(error)
            self.leave_generation(suspicion)
        return False

    def leave_generation(self, reason: str = "") -> None:
        """Seals this rank's position: from here on, nothing of the old generation changes its state."""
        self._token.abort(reason or "this rank has left the generation")
        if (groups := leave_generation(self.rank)) is not None:
            groups.abort()
            self._abandoned.append(groups)
        self.rank.optimizer.discard()
        if self.rank.state.entries:
            self.rank.optimizer.update_to(self.rank.state.iteration, self.rank.update_step())

    def finish(self) -> None:
        """Waits until all ranks are done. Raises GenerationEnded when one is lost before."""
        self._membership.finish()

    # --- entering ------------------------------------------------------------------------------------------------

    def _report(self, generation: int) -> StateReport:
        self.rank.hooks.phase_hook("recovery_report")
        state = self.rank.state
        entries = encode_entries(state.newest)
        return StateReport(
            rank=self.rank.rank,
            generation=generation,
            state_generation=NO_GENERATION if self.record is None else self.record.generation,
            position=LogPosition(iteration=state.iteration, evaluation=int(state.is_evaluated)),
            entries=entries,
            digest=digest_entries(entries),
            version=state.iteration,
            weights_gathered=self.rank.optimizer.is_gathered,
            host=self._host,
            address=self._network.listen(generation),
        )

    def _join(self, pending: PendingGeneration) -> bool:
        """Enters the proposed generation; returns False as a spare. Raises GenerationEnded when it ends before."""
        record, self._token = pending.record, pending.token
        self._apply_missing_entries(pending)
        former = [group for groups in self._abandoned for group in groups.all if isinstance(group, Group)]
        transports = self._network.transports(record, pending.token, former)
        try:
            return self._join_with(record, transports)
        finally:
            if self.rank.generation is None:
                transports.links.close()

    def _join_with(self, record: GenerationRecord, transports: Transports) -> bool:
        rank = self.rank
        share_train_state(rank, record, transports.links)
        has_place = record.grid.holds(rank.rank)
        building = run_in_background(  # meanwhile state moves
            lambda: build_rank_groups(rank, record.grid, record.generation, transports) if has_place else None,
            "build-groups",
        )
        plans = Plans(rank.config, record.grid, self._planned.plans)
        planning = run_in_background(
            lambda: plans.next(rank.state, transports.token.check).digest if has_place else "", "plan"
        )
        try:
            self._move_state(record, transports.links, digest=planning.result)
        except GenerationEnded:
            building.add_done_callback(partial(_close_unused, tuple(self._abandoned)))
            raise
        started = time.perf_counter()
        self._commit(record)
        with self._token.waiting():
            groups = building.result()  # bounded: it ends with the generation
        self._close_abandoned(groups)
        if groups is None:
            return False
        rank.hooks.phase_hook("recovery_groups")
        join_generation(rank, record.generation, groups, plans, transports, leader=record.leader)
        self._planned.begin(record.grid, len(plans.next(rank.state).routes), transports.token)
        if not record.weights_gathered:
            rank.optimizer.gather()
        if rank.is_leader:
            regroup_s = time.perf_counter() - started
            self._publish(
                {
                    "kind": "resumed",
                    "generation": record.generation,
                    "regroup_s": regroup_s,
                    "plan": plans.next(rank.state).reason,
                }
            )
        return True

    def _move_state(self, record: GenerationRecord, links: Links, *, digest: Callable[[], str]) -> None:
        """Builds the new ranges next to the old ones and waits until all ranks have theirs.

        Raises GenerationEnded when a rank is lost before.
        """
        rank = self.rank
        rank.hooks.phase_hook("recovery_moves")
        moved_bytes = rank.optimizer.reshard(
            ReshardPlan(
                generation=record.generation,
                old=None if record.previous is None else self._shard_maps(record.previous, record),
                new=self._shard_maps(record.grid, record),
                live=record.members,
                weights_gathered=record.weights_gathered,
            ),
            links,
        )
        rank.hooks.phase_hook("recovery_confirm")
        self._membership.confirm(record.generation, digest=digest(), moved_bytes=moved_bytes)

    def _shard_maps(self, grid: Grid, record: GenerationRecord) -> ShardMaps:
        return shard_maps_of(self.rank.config, self.rank.coordinates, grid, record.hosts)

    def _apply_missing_entries(self, pending: PendingGeneration) -> None:
        """Applies the newest entry that any rank holds, if this one lacks it, and its update.

        This rank has the gradients for it: the entry exists only because every rank had finished its reduction.
        Spares ignore entries: they have not trained since they left the grid.
        """
        previous = pending.record.previous
        if previous is None or not previous.holds(self.rank.rank):
            return
        for entry in decode_entries(pending.entries):
            self.rank.state = self.rank.state.apply(entry)
        if self.rank.state.entries:
            self.rank.optimizer.update_to(self.rank.state.iteration, self.rank.update_step())

    def _commit(self, record: GenerationRecord) -> None:
        if any(groups.is_busy for groups in self._abandoned):
            self.rank.optimizer.reallocate_buffers()
        self.rank.optimizer.commit()
        self.record = record

    def _close_abandoned(self, current: Groups[Group] | None) -> None:
        """Closes the groups that this rank has left, except those that have come along."""
        for groups in self._abandoned:
            groups.close(keep=() if current is None else (current,))
        self._abandoned = []


def _close_unused(former: Sequence[Groups[Group]], building: Future[Groups[Group] | None]) -> None:
    """Closes groups that were built for a generation which was never committed; the next one may keep the former."""
    if building.exception() is None and (groups := building.result()) is not None:  # bounded: it is done
        groups.close(keep=former)
