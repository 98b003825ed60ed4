"""Simpler rules for the membership protocol, all of them wrong: the model checker finds each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from parallel3d.elastic.protocol.actions import Action, Propose
from parallel3d.elastic.protocol.membership import LogPosition, StateReport
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.elastic.protocol.survivability import Survivability
from parallel3d.parallel.grid import Grid
from tests.support.protocol_model import Model
from tests.support.protocol_search import explore
from tests.support.protocol_steps import (
    uniform,
)
from tests.support.protocol_world import GONE, RUN, Violation, Worker


class FollowsMajority(MembershipProtocol):
    """Goes on from the position that most workers hold."""

    def _find_newest(self) -> StateReport:
        count = Counter(report.position for report in self._reports.values())
        most = count.most_common(1)[0][0]
        return next(report for report in self._reports.values() if report.position == most)


class FollowsSlowest(MembershipProtocol):
    """Goes on from what all hold."""

    def _find_newest(self) -> StateReport:
        return min(self._reports.values(), key=lambda report: report.position)


class FollowsUpdated(MembershipProtocol):
    """Accepts an entry only once a worker has applied its update."""

    def _find_newest(self) -> StateReport:
        lead = max(self._reports.values(), key=lambda report: report.version)
        return replace(lead, position=LogPosition(iteration=lead.version))


class NormPerStage(Model):
    """A stage's all-reduce does not wait for the other stages."""

    def entry_ranks(self, run: int, rank: int) -> tuple[int, ...]:
        return self.share(run, rank).group


class ContributesEarly(Model):
    """A worker takes part in the all-reduce before the copies of the gradients that it backs up have arrived."""

    def may_contribute(self, worker: Worker) -> bool:
        return worker.own


class ReportsWhileRunning(Model):
    """Omits the abort: a worker's state still changes after its report."""

    def leave_step(self, worker: Worker) -> Worker:
        return worker if worker.mode == RUN else super().leave_step(worker)


class FreesEarly(Model):
    """Frees old ranges before all members have confirmed."""

    def after_confirm(self, worker: Worker) -> Worker:
        return worker._replace(held=worker.new)


class UpdatesAgain(Model):
    """Updates every range with gradients, even one that is already at the record's version."""

    def needs_update(self, worker: Worker) -> bool:
        return worker.has_gradients(worker.position)


class LeavesUnreleased(Model):
    """A worker ends with its last iteration."""

    def after_last(self, worker: Worker) -> Worker:
        return worker._replace(mode=GONE)


class CountsStaleConfirms(MembershipProtocol):
    """Does not look at a confirmation's generation."""

    def confirm(self, rank: int, generation: int, digest: str) -> list[Action]:
        if generation == self._generation:
            self._digests = {other: self._digests[other] for other in self._digests if other != rank}
            return super().confirm(rank, generation, digest)
        self._digests = {**self._digests, rank: digest}
        return []


class CountsTheDead(MembershipProtocol):
    """Takes a dead worker that has reported for a holder."""

    def _check_survivability(self, draining: frozenset[int] = frozenset()) -> Survivability:
        dead, live = self._dead, self.live
        self.live |= {rank for rank in dead if rank in self._reports}
        try:
            return super()._check_survivability(draining | dead)
        finally:
            self.live = live


class CommitsByMajority(MembershipProtocol):
    """Most confirmations are enough."""

    def confirm(self, rank: int, generation: int, digest: str) -> list[Action]:
        actions = super().confirm(rank, generation, digest)
        if self._record and 2 * len(self._digests) > len(self._record.members):
            return self._commit(self._record)
        return actions


class TrustsTheUnconfirmed(MembershipProtocol):
    """After a further loss, takes the cut of a record that was never confirmed for the one that is held."""

    def _decide(self) -> list[Action]:
        actions = super()._decide()
        self._grid = actions[-1].record.grid if isinstance(actions[-1], Propose) else self._grid
        return actions


class ReusesNumbers(MembershipProtocol):
    """An attempt that was not committed gives its number back."""

    def _begin(self, reason: str) -> list[Action]:
        if self.pending is not None:
            self._generation -= 1
        return super()._begin(reason)


BACK = "would go back to"
LACKS = "lacks gradients of"
EARLY = "gets a commit while it is (aborted|resolved)"
LOST = "goes on without element"

MUTANTS = [
    # mutant, grid, iterations, faults, reduced, what goes wrong
    (FollowsMajority, uniform(2, 2), 2, {"deaths": 1}, True, BACK),
    (FollowsSlowest, uniform(2, 2), 2, {"deaths": 1}, True, BACK),
    (FollowsUpdated, uniform(2, 2), 2, {"deaths": 1}, True, BACK),
    (NormPerStage, uniform(2, 2), 2, {"deaths": 1}, True, LACKS),
    (ContributesEarly, uniform(2, 2), 2, {"deaths": 1}, True, LACKS),
    (ReportsWhileRunning, uniform(1, 2), 1, {"deaths": 1}, False, BACK),
    (FreesEarly, uniform(1, 3), 1, {"drains": 1}, True, "gets version -1 of element"),
    (UpdatesAgain, uniform(2, 2), 2, {"deaths": 1}, True, r"updates to \(2, 2\) by 1"),
    (LeavesUnreleased, uniform(2, 2), 2, {"deaths": 1}, True, "stuck"),
    (CountsStaleConfirms, uniform(1, 2), 1, {"suspicions": 1}, False, EARLY),
    (CountsTheDead, uniform(1, 3), 1, {"deaths": 2}, True, LOST),
    (CommitsByMajority, uniform(2, 2), 2, {"deaths": 1}, True, EARLY),
    (TrustsTheUnconfirmed, uniform(1, 3), 1, {"deaths": 2}, True, LOST),
    (ReusesNumbers, uniform(1, 3), 1, {"deaths": 2}, False, "reported twice"),
]


@pytest.mark.parametrize(("mutant", "grid", "num_iterations", "faults", "reduced", "wrong"), MUTANTS)
def test_a_wrong_rule_is_found(
    mutant: type[MembershipProtocol] | type[Model],
    grid: Grid,
    num_iterations: int,
    faults: dict[str, int],
    reduced: bool,
    wrong: str,
):
    model_type, protocol = (mutant, MembershipProtocol) if issubclass(mutant, Model) else (Model, mutant)
    model = model_type(grid, num_iterations=num_iterations, protocol=protocol, reduced=reduced)
    with pytest.raises(Violation, match=wrong):
        explore(model, model.start(**{"deaths": 0, **faults}))
