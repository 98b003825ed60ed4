"""New workers and spares that fill vacancies, explored: joins at any moment, with deaths, drains, a coordinator that is
lost. And simpler rules, all of them wrong."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from parallel3d.elastic.protocol.actions import Action, ChangeRequest, DrainRefused, DrainRequest, Propose
from parallel3d.elastic.protocol.membership import LostWorker, StateReport
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.elastic.protocol.vacancies import GridTarget
from parallel3d.errors import OutOfPlaceError
from parallel3d.parallel.grid import Grid, PartId
from tests.support.protocol_model import Model
from tests.support.protocol_search import explore
from tests.support.protocol_steps import agree, confirm_all, make, on_lost, report_all, started, uniform
from tests.support.protocol_takeover import TakeoverModel
from tests.support.protocol_world import DEAD, SPARE, Violation, Worker, World, freeze

TP2 = uniform(1, 2, tp=2)  # replica 0 = 0 1, replica 1 = 2 3


@pytest.mark.sample(1, rest=4)
@pytest.mark.parametrize(
    ("grid", "num_iterations", "faults", "zero_stage"),
    [
        pytest.param(uniform(1, 2), 2, {"deaths": 2, "joins": 2}, 1, marks=pytest.mark.full),
        (uniform(1, 2), 2, {"deaths": 2, "joins": 1}, 0),
        pytest.param(uniform(1, 2), 2, {"deaths": 1, "joins": 1, "drains": 1}, 1, marks=pytest.mark.full),
        pytest.param(uniform(1, 2), 2, {"deaths": 1, "joins": 1, "false_deaths": 1}, 1, marks=pytest.mark.full),
        pytest.param(uniform(1, 3), 1, {"deaths": 2, "joins": 1}, 1, marks=pytest.mark.full),
        pytest.param(uniform(2, 2), 2, {"deaths": 1, "joins": 1}, 1, marks=pytest.mark.full),
        pytest.param(TP2, 2, {"deaths": 1, "joins": 1}, 1, marks=pytest.mark.full),
    ],
)
def test_a_join_in_every_phase(grid: Grid, num_iterations: int, faults: dict[str, int], zero_stage: int):
    model = Model(grid, num_iterations=num_iterations, zero_stage=zero_stage)
    assert "released" in explore(model, model.start(**faults)).ends
    assert any(record.joiners for record in model.records)


@pytest.mark.parametrize(
    ("grid", "faults"),
    [
        (uniform(1, 2), {"deaths": 1, "joins": 1}),
        pytest.param(uniform(1, 1), {"deaths": 1, "joins": 2}, marks=pytest.mark.full),
        pytest.param(uniform(1, 2), {"joins": 1, "drains": 1}, marks=pytest.mark.full),
        pytest.param(uniform(1, 2), {"deaths": 2, "joins": 1}, marks=pytest.mark.full),
    ],
)
def test_growth_in_every_phase(grid: Grid, faults: dict[str, int]):
    model = Model(grid, num_iterations=2, max_replicas=3)
    assert "released" in explore(model, model.start(**faults)).ends
    assert any(len(record.grid.ranks) > len(grid.ranks) for record in model.records)


def test_the_reduction_leaves_no_join_out():
    found = {}
    for reduced in (True, False):
        model = Model(uniform(1, 2), num_iterations=2, reduced=reduced)
        explore(model, model.start(deaths=1, joins=1))
        records = {freeze((record.grid, record.previous, record.position)) for record in model.records}
        found[reduced] = records, model.reports
    assert found[True] == found[False]


def test_a_successor_while_a_worker_joins():
    model = TakeoverModel(uniform(1, 2), num_iterations=1)
    found = explore(model, model.start(deaths=1, joins=1, takeovers=1))
    assert found.ends.keys() == {"released", "halted"} and any(record.joiners for record in model.records)


def test_spares_of_two_broken_replicas_save_their_stage():
    protocol = started(TP2)
    on_lost(protocol, 0)
    on_lost(protocol, 3)
    record = agree(protocol)
    assert [dict(stage) for stage in record.grid.stages] == [{0: (2, 1)}] and not record.joiners


def test_the_leader_is_asked_for_a_change_once_a_replica_can_be_filled():
    protocol = started(uniform(2, 2))
    on_lost(protocol, 3)
    agree(protocol)
    assert protocol.choose_part() == (1, 0) and protocol.choose_part({4: (1, 0)}) is None
    assert protocol.admit(4, (1, 0), "host4") == [ChangeRequest(rank=0, generation=1)]
    assert protocol.choose_part() is None and protocol.live == {0, 1, 2}
    protocol.suspect(0, 1, "a worker joins")
    record = agree(protocol, 3)
    assert record.joiners == (4,) and record.grid.tp_ranks((1, 1)) == (4,) and record.state_source == 0


ASK = [ChangeRequest(rank=0, generation=1)]


def test_workers_join_together_once_enough_wait():
    protocol = started(uniform(1, 4), zero_stage=0, join_threshold=2)
    on_lost(protocol, 1, 2, 3)
    agree(protocol)
    assert protocol.admit(4, (0, 0), "host4") == [] and protocol.holds_back
    assert protocol.admit(5, (0, 0), "host5") == ASK and not protocol.holds_back
    protocol.suspect(0, 1, "workers join")
    assert agree(protocol, 3).joiners == (4, 5) and not protocol.holds_back
    assert protocol.admit(6, (0, 0), "host6") == [ChangeRequest(rank=0, generation=2)], "no more are missing"


def test_a_worker_waits_for_others_until_it_has_waited_enough_or_a_change_comes():
    protocol = started(uniform(1, 4), zero_stage=0, join_threshold=3)
    on_lost(protocol, 2, 3)
    agree(protocol)
    assert protocol.admit(4, (0, 0), "host4") == []
    assert protocol.end_wait() == ASK and not protocol.holds_back
    on_lost(protocol, 1)
    assert agree(protocol, 3).joiners == (4,), "a loss lets it in"
    assert protocol.admit(5, (0, 0), "host5") == [] and protocol.holds_back, "the next one waits again"
    assert on_lost(protocol, 5) == protocol.end_wait() == [], "nobody waits any more"


def test_a_rank_that_has_seen_every_step_leads_as_long_as_there_is_one():
    """Ranks 1 (a spare for a while) and 4 enter later: they lead, and ask for changes, once 2 and 3 are gone."""
    protocol = make(TP2)
    agree(protocol, host="one")
    on_lost(protocol, 0)
    assert agree(protocol, host="one").leader == 2
    assert protocol.admit(4, (0, 0), "one") == [ChangeRequest(rank=2, generation=1)]
    protocol.suspect(2, 1, "a worker joins")
    record = agree(protocol, 3, host="one")
    assert record.grid.ranks == (1, 2, 3, 4) and record.newcomers == (1, 4) and record.leader == 2
    protocol.suspect(1, 2, "a link broke")
    record = agree(protocol, 4, host="one")
    assert record.joiners == () and record.newcomers == (1, 4) and record.leader == 2
    on_lost(protocol, 2)
    record = agree(protocol, 5, host="one")
    assert record.grid.ranks == (1, 4) and record.leader == 1
    assert protocol.admit(5, (0, 0), "one") == [ChangeRequest(rank=1, generation=4)]


def test_a_worker_that_comes_during_a_change_enters_with_the_next():
    protocol = started(uniform(1, 2))
    on_lost(protocol, 1)
    assert protocol.admit(2, (0, 0), "host2") == []
    *_, propose = report_all(protocol)
    assert isinstance(propose, Propose) and propose.record.members == (0,)
    assert confirm_all(protocol)[1:] == [ChangeRequest(rank=0, generation=1)]


def test_a_new_worker_that_dies_before_it_enters_changes_nothing():
    protocol = started(uniform(1, 2))
    on_lost(protocol, 1)
    agree(protocol)
    protocol.admit(2, (0, 0), "host2")
    assert on_lost(protocol, 2) == [] and protocol.pending is None
    with pytest.raises(OutOfPlaceError, match="has the number of another one"):
        protocol.admit(1, (0, 0), "host2")


def test_a_refused_drain_is_granted_once_others_have_come():
    grid = uniform(1, 1)
    protocol = MembershipProtocol(grid, zero_stage=1, zero_backups=1, target=GridTarget.of(grid, max_replicas=2))
    agree(protocol)
    refused = protocol.announce_drain(0)
    assert isinstance(refused[0], DrainRefused) and "stage 0 has no replica left" in refused[0].reason
    assert protocol.choose_part() == (0, 0)
    assert protocol.admit(1, (0, 0), "host1") == [ChangeRequest(rank=0, generation=0)]
    protocol.suspect(0, 0, "a worker joins")
    assert agree(protocol, 3).grid.ranks == (0, 1) and protocol.choose_part() is None
    assert protocol.announce_drain(0) == [DrainRequest(rank=0)]
    protocol.suspect(0, 1, "a worker leaves")
    record = agree(protocol, 5)
    assert record.grid.ranks == (1,) and record.draining == (0,) and protocol.choose_part() == (0, 0)


class ReusesRanks(MembershipProtocol):
    """A new worker may have the number of one that was lost in the same change."""

    def admit(self, rank: int, part: PartId, host: str) -> list[Action]:
        self._parts.pop(rank, None)
        return super().admit(rank, part, host)


class ReusedRanks(Model):
    """A new worker gets the number of a dead one."""

    def _join(self, world: World, part: tuple[int, int]) -> World:
        dead = [rank for rank, worker in enumerate(world.workers) if worker.mode == DEAD and worker.part == part]
        if not dead:
            return super()._join(world, part)
        world = self._put(world, dead[0], Worker(mode=SPARE, part=part))
        return self._submit(world._replace(joins=world.joins - 1), ("admit", dead[0], part))


class AsksJoiners(MembershipProtocol):
    """Takes the newest position among all reports, those of new workers and spares included."""

    def _find_newest(self) -> StateReport:
        return min(self._reports.values(), key=lambda report: (report.position, -report.rank))


class PlacesTheUnreported(MembershipProtocol):
    """Gives places to new workers that came after the change had begun."""

    def _next_grid(self, leaving: Collection[int] = (), *, joining: Collection[int] = ()) -> Grid:
        return super()._next_grid(leaving, joining=self._ready)


class HaltsWithAJoiner(MembershipProtocol):
    """Ends the run when a new worker dies."""

    def on_lost(self, lost_workers: list[LostWorker]) -> list[Action]:
        if any(lost_worker.rank not in (0, 1) for lost_worker in lost_workers):
            return self._stop_run("a new worker is lost")
        return super().on_lost(lost_workers)


class WaitsForJoiners(MembershipProtocol):
    """Waits for the confirmation of a new worker that has died."""

    def on_lost(self, lost_workers: list[LostWorker]) -> list[Action]:
        if self.pending is not None and all(lost_worker.rank not in (0, 1) for lost_worker in lost_workers):
            return []
        return super().on_lost(lost_workers)


class FillsTheUncommitted(MembershipProtocol):
    """After a further loss, fills the grid of a record that was never confirmed."""

    def _decide(self) -> list[Action]:
        actions = super()._decide()
        self._grid = actions[-1].record.grid if isinstance(actions[-1], Propose) else self._grid
        return actions


class CountsStaleWeights(MembershipProtocol):
    """Takes a spare's weights for those of its stage, if its position is the run's."""

    def _propose(self, lead: StateReport, entries: bytes = b"") -> list[Action]:
        *others, propose = super()._propose(lead, entries)
        assert isinstance(propose, Propose)
        reports = [self._reports[rank] for rank in propose.record.grid.ranks]
        are_gathered = all(
            each.weights_gathered and each.position.iteration == lead.position.iteration for each in reports
        )
        self._record = replace(propose.record, weights_gathered=are_gathered)
        return [*others, replace(propose, record=self._record)]


class StartsWithoutState(Model):
    """A joiner keeps the train state with which it was built."""

    def take_state(self, worker: Worker, source: Worker) -> Worker:
        return worker


class JoinerIsASource(Model):
    """A joiner sends ranges as if it had held its place before."""

    def _sources(self, number: int, rank: int) -> tuple[tuple[int, int], ...]:
        record = self.record(number)
        moves = super()._sources(number, rank)
        joiners = [joiner for joiner in record.joiners if joiner != rank]
        return tuple((joiners[0], element) for _, element in moves) if joiners else moves


class GrowsForEver(MembershipProtocol):
    """Gives every new worker a place."""

    def __init__(self, grid: Grid, *, target: GridTarget, **settings: int):
        super().__init__(grid, target=replace(target, widths=(9,) * grid.pp_size), **settings)


BASIC = {"deaths": 1, "joins": 1}


@pytest.mark.parametrize(
    ("model_type", "protocol", "faults", "wrong"),
    [
        (ReusedRanks, ReusesRanks, {"deaths": 2, "joins": 1}, "goes on without"),
        (Model, AsksJoiners, BASIC, "would go back to"),
        (Model, PlacesTheUnreported, BASIC, "places workers that have not reported"),
        (Model, HaltsWithAJoiner, {"deaths": 2, "joins": 1}, "halted although nothing is lost"),
        (Model, WaitsForJoiners, {"deaths": 2, "joins": 1}, "stuck"),
        (Model, FillsTheUncommitted, {"deaths": 2, "joins": 1}, "gets version -1|goes on without|reports"),
        (StartsWithoutState, MembershipProtocol, BASIC, "begins with versions|would go back"),
        (Model, GrowsForEver, {"joins": 1}, "widens the grid to"),
        (JoinerIsASource, MembershipProtocol, BASIC, "gets version -1 of element|stuck"),
    ],
)
def test_a_wrong_rule_is_found(
    model_type: type[Model], protocol: type[MembershipProtocol], faults: dict[str, int], wrong: str
):
    model = model_type(uniform(1, 2), num_iterations=2, protocol=protocol)
    with pytest.raises(Violation, match=wrong):
        explore(model, model.start(**faults))


def test_weights_of_a_spare_that_count_as_gathered_are_found():
    """The sibling of a dead rank, with whose new partner it enters."""
    model = Model(TP2, num_iterations=2, protocol=CountsStaleWeights)
    with pytest.raises(Violation, match="a joiner's weights count as gathered"):
        explore(model, model.start(**BASIC))
    assert any(record.spares for record in model.records)
