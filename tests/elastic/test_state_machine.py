"""The membership protocol: its rules one by one, then everything that can happen to it (protocol_model.py)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.elastic.protocol.membership import NO_GENERATION, GenerationRecord, LogPosition, LostWorker, StateReport
from parallel3d.elastic.protocol.state_machine import (
    MAX_CHANGES_WITHOUT_STEP,
    AbortGeneration,
    Action,
    Commit,
    DrainRefused,
    DrainRequest,
    FinishRun,
    MembershipProtocol,
    Propose,
    StopRun,
)
from parallel3d.elastic.protocol.survivability import Survivability
from parallel3d.errors import ProtocolError
from parallel3d.parallel.grid import Grid
from tests.support.protocol_model import GONE, RUN, Model, Violation, Worker, explore, freeze, walk
from tests.support.tiers import examples

GRID = Grid.uniform(tp_size=1, pp_size=2, dp_size=3)  # stage 0: ranks 0 1 2, stage 1: ranks 3 4 5


def make(grid: Grid = GRID, *, zero_stage: int = 1, zero_backups: int = 1, enabled: bool = True) -> MembershipProtocol:
    return MembershipProtocol(grid, zero_stage=zero_stage, zero_backups=zero_backups, enabled=enabled)


def started(grid: Grid = GRID, **settings: int) -> MembershipProtocol:
    """A protocol whose generation 0 is running."""
    protocol = make(grid, **settings)
    agree(protocol)
    return protocol


def make_report(
    protocol: MembershipProtocol, rank: int, iteration: int = 0, evaluation: int = 0, **fields: object
) -> StateReport:
    assert protocol.pending is not None
    report = StateReport(
        rank=rank,
        generation=protocol.pending,
        state_generation=NO_GENERATION if protocol.committed is None else protocol.committed.generation,
        position=LogPosition(iteration=iteration, evaluation=evaluation),
        entries=({"of": rank},),
        host=f"host{rank}",
        address=(f"host{rank}", 1000 + rank),
    )
    return replace(report, **fields)


def report_all(protocol: MembershipProtocol, iteration: int = 0) -> list[Action]:
    actions: list[Action] = []
    for rank in sorted(protocol.live):
        assert actions == []  # the last one decides
        actions = protocol.report(make_report(protocol, rank, iteration))
    return actions


def confirm_all(protocol: MembershipProtocol) -> list[Action]:
    generation, actions = protocol.pending, []
    for rank in sorted(protocol.live):
        assert actions == [] and generation is not None
        actions = protocol.confirm(rank, generation, "plan")
    return actions


def agree(protocol: MembershipProtocol, iteration: int = 0) -> GenerationRecord:
    """Takes the change under way to its commit."""
    *_, opened = report_all(protocol, iteration)
    assert isinstance(opened, Propose)
    confirm_all(protocol)
    assert protocol.committed is opened.record
    return opened.record


def on_lost(protocol: MembershipProtocol, *ranks: int) -> list[Action]:
    return protocol.on_lost([LostWorker(rank=rank, why="killed") for rank in ranks])


# --- the start, a loss ------------------------------------------------------------------------------------------------


def test_a_run_starts_with_generation_zero():
    protocol = make()
    assert protocol.pending == 0 and protocol.committed is None
    (opened,) = report_all(protocol)
    assert isinstance(opened, Propose)
    record = opened.record
    assert (record.generation, record.grid, record.previous, record.members) == (0, GRID, None, GRID.ranks)
    assert confirm_all(protocol) == [Commit(generation=0, members=GRID.ranks)]
    assert protocol.committed is record and protocol.pending is None and protocol.num_changes == 0


def test_a_loss_makes_the_next_generation_without_the_replica():
    grid = Grid.uniform(tp_size=2, pp_size=1, dp_size=2)
    protocol = started(grid)
    protocol.last_reported_step = 6
    (abort_generation,) = on_lost(protocol, 3)
    assert abort_generation == AbortGeneration(ranks=(0, 1, 2), generation=1, reason="lost rank 3: killed")
    assert protocol.pending == 1 and protocol.live == {0, 1, 2}
    (opened,) = report_all(protocol, iteration=7)
    assert isinstance(opened, Propose)
    record = opened.record
    assert record.grid.ranks == (0, 1) and record.spares == (2,) and record.members == (0, 1, 2)
    assert record.previous == grid
    assert record.evicted == protocol.evicted == (LostWorker(rank=3, why="killed"),)
    assert record.position == LogPosition(iteration=7) and record.entries == ({"of": 0},)
    assert record.hosts == {rank: f"host{rank}" for rank in range(4)}  # the lost one's, too
    assert record.addresses == {rank: (f"host{rank}", 1000 + rank) for rank in range(3)}
    assert record.last_reported_step == 6 and record.reason == "lost rank 3: killed"
    assert confirm_all(protocol) == [Commit(generation=1, members=(0, 1, 2))]
    assert protocol.num_changes == 1 and protocol.evicted == ()


def test_a_loss_before_the_first_commit_starts_without_the_lost():
    protocol = make()
    assert on_lost(protocol, 5) == [AbortGeneration(ranks=(0, 1, 2, 3, 4), generation=1, reason="lost rank 5: killed")]
    record = agree(protocol)
    assert record.previous is None and record.grid.ranks == (0, 1, 2, 3, 4)
    assert protocol.num_changes == 0


@pytest.mark.parametrize("stage_of_change", ["reported by some", "opened", "confirmed by some"])
def test_a_further_loss_begins_anew_against_the_committed_cut(stage_of_change: str):
    protocol = started()
    on_lost(protocol, 2)
    if stage_of_change == "reported by some":
        protocol.report(make_report(protocol, 0))
    else:
        report_all(protocol)
    if stage_of_change == "confirmed by some":
        protocol.confirm(0, 1, "plan")
    assert on_lost(protocol, 5) == [AbortGeneration(ranks=(0, 1, 3, 4), generation=2, reason="lost rank 5: killed")]
    for rank in (0, 1, 3, 4):  # words about generation 1 that were under way
        assert protocol.confirm(rank, 1, "plan") == []
    record = agree(protocol)
    assert record.generation == 2 and record.previous == GRID and record.grid.ranks == (0, 1, 3, 4)
    assert [loss.rank for loss in record.evicted] == [2, 5]
    assert record.reason == "lost rank 2: killed; lost rank 5: killed"
    assert protocol.num_changes == 1


def test_two_lost_at_once_are_one_change():
    protocol = started()
    (abort_generation,) = protocol.on_lost(
        [LostWorker(rank=1, why="a"), LostWorker(rank=3, why="b"), LostWorker(rank=1, why="a")]
    )
    assert abort_generation == AbortGeneration(
        ranks=(0, 2, 4, 5), generation=1, reason="lost rank 1: a; lost rank 3: b"
    )
    assert on_lost(protocol, 1, 3) == []  # gone already


def test_a_spare_stays_a_member_and_its_position_is_not_asked():
    protocol = started(Grid.uniform(tp_size=2, pp_size=1, dp_size=3))
    on_lost(protocol, 1)
    agree(protocol)
    on_lost(protocol, 3)
    for rank in (0, 2, 4):
        assert protocol.report(make_report(protocol, rank, 0 if rank == 0 else 20)) == []
    (opened,) = protocol.report(make_report(protocol, 5, 20))
    assert isinstance(opened, Propose)
    assert opened.record.grid.ranks == (4, 5) and opened.record.spares == (0, 2)
    assert opened.record.position == LogPosition(iteration=20)


# --- who holds the newest entry ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "newest"),
    [
        ([(7, 0), (6, 0)], (7, 0)),
        ([(6, 1), (7, 0)], (7, 0)),
        ([(7, 1), (7, 0)], (7, 1)),
        ([(7, 1), (7, 1)], (7, 1)),
    ],
)
def test_everybody_goes_on_from_the_newest_entry(positions: list[tuple[int, int]], newest: tuple[int, int]):
    protocol = started(Grid.uniform(tp_size=1, pp_size=1, dp_size=2))
    protocol.suspect(0, 0, "a link broke")
    actions: list[Action] = []
    for rank, position in enumerate(positions):
        actions = protocol.report(make_report(protocol, rank, *position))
    assert isinstance(actions[0], Propose)
    record = actions[0].record
    assert record.position == LogPosition(iteration=newest[0], evaluation=newest[1])
    assert record.entries == ({"of": positions.index(newest)},)


@pytest.mark.parametrize("positions", [[(5, 0), (7, 0), (7, 0)], [(6, 0), (6, 1), (7, 0)]])
def test_nobody_can_be_two_entries_behind(positions: list[tuple[int, int]]):
    protocol = started(Grid.uniform(tp_size=1, pp_size=1, dp_size=3))
    protocol.suspect(0, 0, "a link broke")
    with pytest.raises(ProtocolError, match=r"rank 0 at .* is more than one entry behind rank (1|2)"):
        for rank, position in enumerate(positions):
            protocol.report(make_report(protocol, rank, *position))


def test_everybody_holds_the_committed_cut():
    protocol = started(Grid.uniform(tp_size=1, pp_size=1, dp_size=2))
    protocol.suspect(0, 0, "a link broke")
    protocol.report(make_report(protocol, 0))
    with pytest.raises(ProtocolError, match="rank 1 holds the ranges of generation -1; committed is 0"):
        protocol.report(make_report(protocol, 1, state_generation=NO_GENERATION))


# --- words out of place -----------------------------------------------------------------------------------------------


def test_messages_of_older_generations_and_of_lost_workers_are_ignored():
    protocol = started()
    on_lost(protocol, 2)
    old = make_report(protocol, 0, generation=0)
    dead = make_report(protocol, 2)
    before = freeze(vars(protocol))
    assert protocol.report(old) == protocol.report(dead) == []
    assert protocol.confirm(0, 0, "plan") == protocol.confirm(2, 1, "plan") == []
    assert protocol.suspect(0, 0, "the dead peer") == protocol.suspect(2, 1, "") == []
    assert protocol.finish(0, 0) == []
    assert freeze(vars(protocol)) == before


def test_messages_that_break_the_protocol():
    protocol = started()
    for say in (
        lambda: protocol.confirm(0, 0, "plan"),
        lambda: protocol.confirm(0, 1, "plan"),
        lambda: protocol.suspect(0, 1, "why"),
        lambda: protocol.finish(0, 1),
        lambda: protocol.report(replace(REPORT_TO_NOTHING, generation=0)),
        lambda: protocol.report(replace(REPORT_TO_NOTHING, generation=1)),
    ):
        with pytest.raises(ProtocolError):
            say()
    on_lost(protocol, 2)
    protocol.report(make_report(protocol, 0))
    with pytest.raises(ProtocolError, match="twice"):
        protocol.report(make_report(protocol, 0))
    with pytest.raises(ProtocolError, match="finished"):
        protocol.finish(1, 1)
    with pytest.raises(ProtocolError, match="not asked"):
        protocol.confirm(0, 1, "plan")
    on_lost(protocol, 5)
    report_all(protocol)
    protocol.confirm(0, 2, "plan")
    with pytest.raises(ProtocolError, match="not asked"):
        protocol.confirm(0, 2, "plan")
    protocol.suspect(0, 2, "a link broke")
    with pytest.raises(ProtocolError, match="not asked"):
        protocol.confirm(0, 3, "plan")  # the record of generation 2 is void


REPORT_TO_NOTHING = StateReport(rank=0, generation=0)


def test_different_plans_end_the_run():
    protocol = make()
    report_all(protocol)
    for rank in range(5):
        protocol.confirm(rank, 0, "plan" if rank != 3 else "another plan")
    assert protocol.confirm(5, 0, "plan") == [StopRun(reason="ranks 0 and 3 made different plans for generation 0")]


def test_spares_and_leavers_make_no_plan():
    protocol = started(Grid.uniform(tp_size=2, pp_size=1, dp_size=3))
    protocol.announce_drain(0)
    on_lost(protocol, 3)
    report_all(protocol)
    for rank, digest in {0: "", 1: "", 2: "", 4: "plan"}.items():
        assert protocol.confirm(rank, 1, digest) == []
    assert protocol.confirm(5, 1, "plan") == [Commit(generation=1, members=(0, 1, 2, 4, 5))]


# --- the end ----------------------------------------------------------------------------------------------------------


def test_nobody_is_released_before_all_are_done():
    protocol = started(Grid.uniform(tp_size=2, pp_size=1, dp_size=2))
    on_lost(protocol, 0)
    agree(protocol)
    assert protocol.finish(1, 1) == []  # a spare
    assert protocol.finish(2, 1) == protocol.finish(2, 1) == []
    assert protocol.finish(3, 1) == [FinishRun(ranks=(1, 2, 3))]
    assert protocol.over
    assert on_lost(protocol, 3) == protocol.announce_drain(2) == protocol.suspect(2, 1, "late") == []


def test_a_loss_before_the_release_is_a_change_as_always():
    protocol = started()
    for rank in range(5):
        protocol.finish(rank, 0)
    assert on_lost(protocol, 5) == [AbortGeneration(ranks=(0, 1, 2, 3, 4), generation=1, reason="lost rank 5: killed")]
    agree(protocol)
    for rank in range(4):
        assert protocol.finish(rank, 1) == []  # what they said in generation 0 does not count
    assert protocol.finish(4, 1) == [FinishRun(ranks=(0, 1, 2, 3, 4))]


def test_a_stage_without_replica_halts_at_once_and_only_once():
    protocol = started()
    on_lost(protocol, 0)
    agree(protocol)
    on_lost(protocol, 2)
    agree(protocol)
    (stop_run,) = on_lost(protocol, 1)
    assert isinstance(stop_run, StopRun)
    assert stop_run.reason == "stage 0 has no replica left: lost pp0 dp1 tp0 (rank 1)"
    assert on_lost(protocol, 3, 4, 5) == protocol.report(StateReport(rank=3, generation=2)) == []


def test_a_range_without_holder_halts():
    (stop_run,) = on_lost(started(), 0, 1)
    assert stop_run == StopRun(
        reason="range 0 of the optimizer state of stage 0, tp 0 has no holder left: ranks 0 and 1 were lost"
    )


def test_holders_are_those_of_the_committed_cut():
    protocol = started()
    on_lost(protocol, 0)
    report_all(protocol)  # the new shard map has two holders of each range, but no member has confirmed it
    (stop_run,) = on_lost(protocol, 1)
    assert isinstance(stop_run, StopRun)
    again = started()
    on_lost(again, 0)
    agree(again)
    assert isinstance(on_lost(again, 1)[0], AbortGeneration)


def test_without_elasticity_the_first_loss_ends_the_run():
    protocol = make(enabled=False)
    agree(protocol)
    assert on_lost(protocol, 4) == [StopRun(reason="lost rank 4: killed (elastic.enabled is false)")]
    protocol = make(enabled=False)
    assert protocol.announce_drain(4) == [DrainRefused(rank=4, reason="elastic.enabled is false")]


def test_changes_without_a_step_in_between_end_the_run():
    protocol = started()
    for number in range(MAX_CHANGES_WITHOUT_STEP):
        protocol.suspect(1, number, "no route")
        agree(protocol)
    protocol.suspect(1, MAX_CHANGES_WITHOUT_STEP, "no route")
    assert report_all(protocol) == [StopRun(reason="8 changes of membership without a step: rank 1: no route")]


def test_attempts_that_never_commit_end_the_run_too():
    protocol = make()
    for generation in range(MAX_CHANGES_WITHOUT_STEP):
        report_all(protocol)
        protocol.suspect(3, generation, "can't move")
    (stop_run,) = report_all(protocol)
    assert isinstance(stop_run, StopRun)


def test_steps_in_between_make_changes_worth_it():
    protocol = started()
    for number in range(3 * MAX_CHANGES_WITHOUT_STEP):
        protocol.suspect(1, number, "no route")
        agree(protocol, iteration=number // MAX_CHANGES_WITHOUT_STEP + 1)


# --- suspicions and departures ----------------------------------------------------------------------------------------


def test_a_suspicion_makes_a_generation_of_the_same_members():
    protocol = started()
    assert protocol.suspect(3, 0, "a link broke") == [
        AbortGeneration(ranks=GRID.ranks, generation=1, reason="rank 3: a link broke")
    ]
    assert protocol.suspect(4, 0, "a link broke") == []  # of a generation that is over
    record = agree(protocol)
    assert record.grid == record.previous == GRID and protocol.num_changes == 1
    assert record.reason == "rank 3: a link broke"
    protocol.suspect(4, 1, "another one")
    assert agree(protocol).reason == "rank 4: another one"


def test_a_leaver_hands_over_and_is_gone_with_the_commit():
    protocol = started()
    assert protocol.announce_drain(4) == [DrainRequest(rank=4)]
    assert protocol.announce_drain(4) == []
    protocol.suspect(4, 0, "leaves")  # its step boundary
    record = agree(protocol)
    assert record.draining == (4,) and record.members == GRID.ranks and record.grid.ranks == (0, 1, 2, 3, 5)
    assert record.spares == ()
    assert protocol.live == {0, 1, 2, 3, 5} and on_lost(protocol, 4) == []


def test_a_leaver_leaves_with_any_change():
    protocol = started()
    protocol.announce_drain(4)
    on_lost(protocol, 0)
    assert agree(protocol).draining == (4,)


def test_a_leaver_that_dies_before_the_commit_is_a_loss():
    protocol = started()
    protocol.announce_drain(4)
    protocol.suspect(4, 0, "leaves")
    report_all(protocol)
    assert isinstance(on_lost(protocol, 4)[0], AbortGeneration)
    record = agree(protocol)
    assert record.draining == () and [loss.rank for loss in record.evicted] == [4]


def test_asked_after_the_record_it_leaves_with_the_next_change():
    protocol = started()
    on_lost(protocol, 0)
    report_all(protocol)
    assert protocol.announce_drain(4) == [DrainRequest(rank=4)]
    confirm_all(protocol)
    assert 4 in protocol.live
    protocol.suspect(4, 1, "leaves")
    assert agree(protocol).draining == (4,)


def test_a_worker_without_whom_it_cannot_go_on_stays():
    protocol = started(Grid.uniform(tp_size=1, pp_size=2, dp_size=2))
    assert protocol.announce_drain(0) == [DrainRequest(rank=0)]
    (stay,) = protocol.announce_drain(1)
    assert stay == DrainRefused(
        rank=1, reason="stage 0 has no replica left: lost pp0 dp0 tp0 (rank 0) and pp0 dp1 tp0 (rank 1)"
    )


def test_a_drain_is_refused_when_a_death_comes_first():
    protocol = started(Grid.uniform(tp_size=1, pp_size=1, dp_size=3))
    protocol.announce_drain(0)
    protocol.announce_drain(1)
    on_lost(protocol, 2)
    stay, opened = report_all(protocol)
    assert isinstance(stay, DrainRefused) and stay.rank == 1
    assert isinstance(opened, Propose) and opened.record.draining == (0,)
    confirm_all(protocol)
    assert protocol.live == {1}
    protocol.suspect(1, 1, "a link broke")
    assert len(report_all(protocol)) == 1  # said once


def test_a_spare_leaves_at_once():
    protocol = started(Grid.uniform(tp_size=2, pp_size=1, dp_size=2))
    on_lost(protocol, 0)
    agree(protocol)
    assert protocol.announce_drain(1) == [AbortGeneration(ranks=(1, 2, 3), generation=2, reason="rank 1 leaves")]
    assert agree(protocol).draining == (1,)
    assert protocol.live == {2, 3} and protocol.pending is None


def test_a_spare_leaves_with_the_change_under_way():
    protocol = started(Grid.uniform(tp_size=2, pp_size=1, dp_size=3))
    on_lost(protocol, 0)
    agree(protocol)
    on_lost(protocol, 2)
    assert protocol.announce_drain(1) == [DrainRequest(rank=1)]
    assert agree(protocol).draining == (1,)


def test_who_becomes_a_spare_while_it_waits_to_leave_leaves_at_once():
    protocol = started(Grid.uniform(tp_size=2, pp_size=1, dp_size=2))
    on_lost(protocol, 0)
    report_all(protocol)
    assert protocol.announce_drain(1) == [DrainRequest(rank=1)]
    assert confirm_all(protocol) == [
        Commit(generation=1, members=(1, 2, 3)),
        AbortGeneration(ranks=(1, 2, 3), generation=2, reason="rank 1 leaves"),
    ]


# --- everything that can happen ---------------------------------------------------------------------------------------


def uniform(pp: int, dp: int, tp: int = 1) -> Grid:
    return Grid.uniform(tp_size=tp, pp_size=pp, dp_size=dp)


@pytest.mark.full
def test_two_deaths_anywhere_in_two_stages_of_two_replicas():
    model = Model(uniform(2, 2), num_iterations=2)
    found = explore(model, model.start(deaths=2))
    assert found.num_worlds > 50_000 and found.ends.keys() == {"released", "halted"}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("grid", "settings", "faults"),
    [
        (uniform(1, 3), {}, {"deaths": 3}),
        (uniform(1, 3), {"zero_backups": 0}, {"deaths": 2}),
        (uniform(1, 3), {"zero_stage": 0}, {"deaths": 2}),
        (uniform(1, 2, tp=2), {}, {"deaths": 2}),
        (uniform(1, 3), {}, {"deaths": 1, "suspicions": 1}),
        (uniform(1, 3), {}, {"deaths": 1, "drains": 2}),
        (uniform(1, 2, tp=2), {}, {"deaths": 1, "drains": 1}),
    ],
)
def test_other_small_worlds(grid: Grid, settings: dict[str, int], faults: dict[str, int]):
    model = Model(grid, num_iterations=1, **settings)
    found = explore(model, model.start(**faults))
    assert "released" in found.ends and found.num_worlds > 100


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("grid", "faults"),
    [
        (uniform(1, 3), {"deaths": 2}),
        (uniform(2, 2), {"deaths": 1}),
        (uniform(1, 2), {"deaths": 1, "suspicions": 1}),
        (uniform(1, 2), {"deaths": 1, "drains": 1}),
    ],
)
def test_the_reduction_leaves_nothing_out(grid: Grid, faults: dict[str, int]):
    """The same decisions on the same reports, the same ends, with it and without."""
    found = {}
    for reduced in (True, False):
        model = Model(grid, num_iterations=1, reduced=reduced)
        ends = explore(model, model.start(**faults)).ends.keys()
        found[reduced] = ends, {decision(record) for record in model.records}, model.reports
    assert found[True] == found[False]


def decision(record: GenerationRecord) -> tuple[object, ...]:
    """What matters of a record: not in which order workers died, nor whether they had reported before."""
    evicted = frozenset(loss.rank for loss in record.evicted)
    return freeze(replace(record, hosts={}, evicted=())), evicted


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Model, dict[str, int]]:
    grid = Grid.of_replicas(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), tp_size=draw(st.integers(1, 2)))
    hosts = {rank: str(draw(st.integers(0, 2))) for rank in grid.ranks}
    model = Model(
        grid,
        num_iterations=draw(st.integers(1, 4)),
        zero_stage=draw(st.sampled_from([1, 1, 0])),
        zero_backups=draw(st.sampled_from([1, 1, 0])),
        hosts=hosts,
        reduced=False,
    )
    faults = {"deaths": draw(st.integers(0, 4)), "suspicions": draw(st.integers(0, 3))}
    return model, {**faults, "drains": draw(st.integers(0, 2))}


@settings(max_examples=examples(400))
@given(world=worlds(), seed=st.integers(0, 2**32), fault_rate=st.sampled_from([0.01, 0.05, 0.3]))
def test_random_ways_through_larger_worlds(world: tuple[Model, dict[str, int]], seed: int, fault_rate: float):
    model, faults = world
    assert walk(model, model.start(**faults), seed, fault_rate=fault_rate).ended in ("released", "halted")


# --- simpler rules, which are wrong -----------------------------------------------------------------------------------


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
        self._generation -= self.pending is not None
        return super()._begin(reason)


BACK = "would go back to"
LACKS = "lacks gradients of"
EARLY = "is told to go, it is (aborted|resolved)"
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
