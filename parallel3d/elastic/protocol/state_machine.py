"""The membership protocol as a state machine: evidence in, actions out. Pure.

The coordinator feeds it events (reports, confirmations, deaths, suspicions, drains) and carries out the actions that it
returns. One change of membership::

    evidence       > AbortGeneration   every live worker leaves its generation; its state no longer changes
    report x all   > FetchEntries      the newest entries, from one worker that holds them, if another one lacks them
    entries        > Propose           the record: members, position, and the grid by whose shard map state is held
                     or StopRun        a stage without a replica, a range of optimizer state without a live holder
    confirm x all  > Commit            all members hold their new state: only now may the old ranges be freed

Any further death restarts at AbortGeneration with the next number. Until Commit all decisions are based on the last
committed generation, by whose shard map all workers still hold their ranges. The start of a run is generation 0: all
workers report without state, and no AbortGeneration precedes it.

tests/support/protocol_model.py shows by exhaustive exploration that this is right, and which simpler rules are wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
from parallel3d.elastic.protocol.membership import (
    NO_GENERATION,
    GenerationRecord,
    LogPosition,
    LostWorker,
    StateReport,
    digest_entries,
    find_newcomers,
)
from parallel3d.elastic.protocol.newest_report import find_newest
from parallel3d.elastic.protocol.survivability import Survivability, check_survivability
from parallel3d.elastic.protocol.vacancies import GridTarget
from parallel3d.elastic.protocol.worker_table import WorkerTable
from parallel3d.errors import OutOfPlaceError, ProtocolError
from parallel3d.parallel.grid import Grid, PartId

MAX_CHANGES_WITHOUT_STEP = 8
"""More consecutive changes without a step in between end the run: their common cause is not an accident."""


class MembershipProtocol(WorkerTable):
    """The coordinator's decisions. copy.copy is a snapshot: tables are copied, all other attributes are replaced and
    never changed in place."""

    def __init__(
        self,
        grid: Grid,
        *,
        zero_stage: int,
        zero_backups: int,
        enabled: bool = True,
        target: GridTarget | None = None,
        join_threshold: int = 1,
    ):
        super().__init__(grid, target)
        self.committed: GenerationRecord | None = None
        """The record of the last committed generation."""
        self.evicted: tuple[LostWorker, ...] = ()
        """Workers lost since then."""
        self.num_changes = 0
        """Committed generations after the first."""
        self.over = False
        """True after StopRun or FinishRun: no further actions."""
        self.last_reported_step = 0
        """The last step that the reporter has received; set by the caller, carried by the next record."""
        self._hands_over = False
        """The coordinator waits for a change in which another one takes over."""
        self._join_threshold = join_threshold
        self.holds_back = False
        """Workers that could join wait for others."""
        self._zero_stage = zero_stage
        self._zero_backups = zero_backups
        self._enabled = enabled
        self._generation = 0
        """The newest number, committed or pending."""
        self._reasons: tuple[str, ...] = ()
        """Why the membership has changed since the last committed generation."""
        self._reports: dict[int, StateReport] = {}
        self._lead: StateReport | None = None
        """The report of the worker that was asked for its entries."""
        self._record: GenerationRecord | None = None
        """Proposed, not yet confirmed by all."""
        self._digests: dict[int, str] = {}
        self._unfinished: dict[int, None] = {}
        """The ranks of the grid that have not completed their last step in this generation."""
        self._newest = LogPosition()
        self._num_changes_without_step = 0

    def __copy__(self) -> MembershipProtocol:
        copied = self.__class__.__new__(self.__class__)
        names = ("_hosts", "_parts", "_reports", "_digests", "_unfinished")
        tables = {name: dict(getattr(self, name)) for name in names}
        copied.__dict__.update(self.__dict__, **tables)
        return copied

    @property
    def pending(self) -> int | None:
        """The number of the change under way; None while a committed generation runs."""
        committed = self.committed
        return None if committed is not None and committed.generation == self._generation else self._generation

    @property
    def awaited(self) -> tuple[int, bool, bool] | None:
        """The wait under way: the generation, whether for entries, whether for what precedes the record; or None."""
        return None if self.pending is None else (self.pending, self._lead is not None, self._record is None)

    @property
    def unanswered(self) -> frozenset[int]:
        """Live workers that the change under way waits for: for their reports, entries or confirmations."""
        if self.pending is None:
            return frozenset()
        if self._lead is not None:
            return frozenset({self._lead.rank})
        if self._record is None:
            return self.live - self._reports.keys()
        return frozenset(self._record.members) - self._digests.keys()

    def can_spare(self, ranks: Collection[int]) -> bool:
        """True if the run could go on without these workers as well."""
        return self._check_survivability(dead=self._dead | frozenset(ranks)).can_continue

    def report(self, report: StateReport) -> list[Action]:
        """Handles a worker's state report; the last one's triggers the decision."""
        if not self._is_current(report.rank, report.generation):
            return []
        if self.pending is None or report.rank in self._reports:
            raise OutOfPlaceError(f"rank {report.rank} reported twice to generation {report.generation}")
        if (host := self._hosts.setdefault(report.rank, report.host)) != report.host:
            raise OutOfPlaceError(f"rank {report.rank} reported from host {report.host}, it was on {host}")
        self._reports[report.rank] = report
        return self._decide() if len(self._reports) == len(self.live) else []

    def entries(self, rank: int, generation: int, entries: bytes) -> list[Action]:
        """Handles the entries of the worker that was asked for them."""
        if not self._is_current(rank, generation):
            return []
        lead, self._lead = self._lead, None
        if lead is None or lead.rank != rank:
            raise OutOfPlaceError(f"rank {rank} sent entries to generation {generation}, which it was not asked for")
        if digest_entries(entries) != lead.digest:
            raise OutOfPlaceError(f"rank {rank} sent other entries than those that it reported")
        return self._propose(lead, entries)

    def confirm(self, rank: int, generation: int, digest: str) -> list[Action]:
        """Handles a member's confirmation that it holds its new state; the last one's commits the generation."""
        if not self._is_current(rank, generation):
            return []
        if self._record is None or rank in self._digests:
            raise OutOfPlaceError(f"rank {rank} confirmed generation {generation}, which it was not asked to")
        self._digests[rank] = digest
        if len(self._digests) < len(self._record.members):
            return []
        first, *others = self._record.grid.ranks
        for other in others:
            if self._digests[other] != self._digests[first]:
                return self._stop_run(f"ranks {first} and {other} made different plans for generation {generation}")
        return self._commit(self._record)

    def on_lost(self, lost_workers: Sequence[LostWorker]) -> list[Action]:
        """Handles dead workers; ranks that are no longer live are ignored."""
        lost = {lost_worker.rank for lost_worker in lost_workers}
        self._ready, self._draining = self._ready - lost, self._draining - lost
        self._released -= lost
        new = {lost_worker.rank: lost_worker for lost_worker in lost_workers if lost_worker.rank in self.live}
        if not new or self.over:
            return []
        self.live = (self.live - set(new)) | self._ready  # these take part in the change that begins
        self.evicted += tuple(new.values())
        reason = "; ".join(f"lost rank {lost_worker.rank}: {lost_worker.why}" for lost_worker in new.values())
        if not self._enabled:
            return self._stop_run(f"{reason} (elastic.enabled is false)")
        survivability = self._check_survivability()
        return self._begin(reason) if survivability.can_continue else self._stop_run(survivability.reason)

    def suspect(self, rank: int, generation: int, reason: str) -> list[Action]:
        """Handles a worker that has left `generation` for a reason that only it has seen: begins a change."""
        if not self._is_current(rank, generation):
            return []
        if self.pending is not None:
            self._num_changes_without_step += 1
        return self._begin(f"rank {rank}: {reason}")

    def admit(self, rank: int, part: PartId, host: str) -> list[Action]:
        """Handles a new worker that has built `part` of the model: it enters with the next change of membership."""
        if rank in self._parts and rank not in self._released:
            raise OutOfPlaceError(f"the new worker {rank} has the number of another one")
        self._released -= {rank}
        self._parts[rank], self._hosts[rank] = part, host
        self._ready |= {rank}
        return self._request_change()

    def announce_drain(self, rank: int) -> list[Action]:
        """Handles the announcement that a worker must leave."""
        if rank not in self.live | self._ready or rank in self._draining or self.over:
            return []
        survivability = self.check_drain([rank])
        if not survivability.can_continue:
            return [DrainRefused(rank=rank, reason=survivability.reason)]
        self._draining |= {rank}
        return [DrainRequest(rank=rank)] if self._grid.holds(rank) else self._request_change()

    def check_drain(self, ranks: Collection[int]) -> Survivability:
        """Decides whether the run could go on without these workers and those that leave already."""
        if not self._enabled:
            return Survivability(can_continue=False, reason="elastic.enabled is false")
        return self._check_survivability(draining=self._draining | frozenset(ranks))

    def drain(self, ranks: Collection[int]) -> list[Action]:
        """Handles a command that workers leave, which `check_drain` allows: the leader requests the change."""
        self._draining |= (self.live | self._ready).intersection(ranks)
        return self._request_change()

    def request_hand_over(self) -> list[Action]:
        """Handles that another coordinator should take over, which it can between two steps."""
        self._hands_over = True
        return self._request_change()

    def end_wait(self) -> list[Action]:
        """Handles that workers have waited long enough for others to join with them."""
        return self._request_change(is_wait_over=True)

    def finish(self, rank: int, generation: int) -> list[Action]:
        """Handles a worker of the grid that has completed its last step; workers end once all have."""
        if not self._is_current(rank, generation):
            return []
        if self.pending is not None:
            raise OutOfPlaceError(f"rank {rank} finished in generation {generation}, which has not begun")
        self._unfinished.pop(rank, None)
        if self._unfinished:
            return []
        self.over = True
        return [FinishRun(ranks=tuple(sorted(self.live | self._ready)))]

    def _is_current(self, rank: int, generation: int) -> bool:
        """False for messages from dead ranks or earlier generations, which may still arrive."""
        if generation > self._generation:
            raise OutOfPlaceError(f"rank {rank} refers to generation {generation}, the newest is {self._generation}")
        return generation == self._generation and rank in self.live and not self.over

    def _begin(self, reason: str) -> list[Action]:
        self._generation += 1
        self.holds_back = False
        self.live, self._ready = self.live | self._ready, frozenset()
        self._reasons += (reason,)
        self._reports, self._lead, self._record, self._digests = {}, None, None, {}
        return [AbortGeneration(ranks=tuple(sorted(self.live)), generation=self._generation, reason=reason)]

    def _decide(self) -> list[Action]:
        """Decides where the next generation goes on: all live workers have reported."""
        # The newest entry wins, not the most common: it exists only because every rank of the grid had contributed to
        # it, with its reduced gradients and those that it backs up, so every rank can follow. State is still held by
        # the committed shard map (`previous`), since nothing has moved. A further loss before all have confirmed
        # discards this record (`_begin`), and the next decision starts from the committed grid again.
        lead = self._find_newest()
        if lead.position > self._newest:
            self._newest, self._num_changes_without_step = lead.position, 0
        elif self._num_changes_without_step >= MAX_CHANGES_WITHOUT_STEP:
            return self._stop_run(
                f"{self._num_changes_without_step} changes of membership without a step: {self._reasons[-1]}"
            )
        if not self._behind(lead):
            return self._propose(lead)
        self._lead = lead
        return [FetchEntries(rank=lead.rank, generation=self._generation)]

    def _behind(self, lead: StateReport) -> tuple[int, ...]:
        """Returns the members that have trained and lack the newest entry."""
        reports = self._reports
        return tuple(rank for rank in self._grid.ranks if rank in reports and reports[rank].position < lead.position)

    def _propose(self, lead: StateReport, entries: bytes = b"") -> list[Action]:
        draining, refused = self._grant_drains()
        grid = self._next_grid(draining)
        self._record = GenerationRecord(
            generation=self._generation,
            grid=grid,
            previous=None if self.committed is None else self._grid,
            members=tuple(sorted(self.live)),
            draining=tuple(sorted(draining)),
            evicted=self.evicted,
            position=lead.position,
            weights_gathered=all(
                self._grid.holds(rank)
                and self._reports[rank].weights_gathered
                and self._reports[rank].position.iteration == lead.position.iteration
                for rank in grid.ranks
            ),
            parts={rank: self._parts[rank] for rank in self.live - draining if not grid.holds(rank)},
            newcomers=find_newcomers(grid, self.committed),
            hosts=dict(self._hosts),
            addresses={rank: self._reports[rank].address for rank in sorted(self._reports)},
            last_reported_step=self.last_reported_step,
            reason="; ".join(self._reasons),
        )
        return [*refused, Propose(record=self._record, base=self.committed, behind=self._behind(lead), entries=entries)]

    def _find_newest(self) -> StateReport:
        """Returns the report of a worker that holds the newest entry; raises ProtocolError if reports are inconsistent.

        Spares and new workers are ignored: they have not taken part in an all-reduce since the last commit.
        """
        state_generation = NO_GENERATION if self.committed is None else self.committed.generation
        trained = self.live if self.committed is None else self._grid.ranks
        reports = [self._reports[rank] for rank in trained if rank in self._reports]
        for report in reports:
            if report.state_generation != state_generation:
                raise ProtocolError(
                    f"rank {report.rank} holds the ranges of generation {report.state_generation}; "
                    f"committed is {state_generation}"
                )
        return find_newest(reports)

    def _grant_drains(self) -> tuple[frozenset[int], list[DrainRefused]]:
        """Returns the ranks that leave with this change, and refusals for those that losses now make indispensable."""
        draining: frozenset[int] = frozenset()
        refused = []
        for rank in sorted(self._draining & self.live):
            survivability = self._check_survivability(draining=draining | {rank})
            if survivability.can_continue:
                draining |= {rank}
            else:
                refused.append(DrainRefused(rank=rank, reason=survivability.reason))
        self._draining = draining | (self._draining - self.live)
        return draining, refused

    def _commit(self, record: GenerationRecord) -> list[Action]:
        if self.committed is not None:
            self.num_changes += 1
            self._num_changes_without_step += 1
        self.committed, self._grid = record, record.grid
        self.live -= set(record.draining)
        self._draining -= set(record.draining)
        self._reports, self._record, self._digests = {}, None, {}
        self._unfinished = dict.fromkeys(self._grid.ranks)
        self.evicted, self._reasons = (), ()
        return [Commit(generation=record.generation, members=record.members), *self._request_change()]

    def _request_change(self, *, is_wait_over: bool = False) -> list[Action]:
        """Asks the leader for a change if workers are to leave, or could fill a vacancy without waiting for others."""
        self.holds_back = False
        if self.committed is None or self.pending is not None or self.over:
            return []
        grid = self._next_grid(joining=self._ready)
        self.holds_back = grid != self._grid and not (is_wait_over or self._may_join(grid))
        is_right = not (self._draining or self._hands_over) and (self.holds_back or grid == self._grid)
        return [] if is_right else [ChangeRequest(rank=self.committed.leader, generation=self._generation)]

    def _may_join(self, grid: Grid) -> bool:
        """Whether those who would have a place in `grid` are enough, or no more are missing."""
        if self._join_threshold <= 1:
            return True
        num_joiners = len(set(grid.ranks) - set(self._grid.ranks))
        return num_joiners >= self._join_threshold or self.choose_part() is None

    def _stop_run(self, reason: str) -> list[Action]:
        self.over = True
        return [StopRun(reason=reason)]

    def _check_survivability(
        self, draining: frozenset[int] = frozenset(), dead: frozenset[int] | None = None
    ) -> Survivability:
        dead = self._dead if dead is None else dead
        return check_survivability(
            self._grid,
            zero_stage=self._zero_stage,
            zero_backups=self._zero_backups,
            hosts={} if self.committed is None else self.committed.hosts,
            dead=dead,
            draining=draining,
            fresh=self.committed is None,
            next_grid=self._next_grid({*dead, *draining}),
        )
