"""The membership protocol rule by rule: starts, losses, reports, the end. Drains are in test_protocol_drains.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel3d.elastic.protocol.actions import (
    AbortGeneration,
    Action,
    Commit,
    DrainRefused,
    FetchEntries,
    FinishRun,
    Propose,
    StopRun,
)
from parallel3d.elastic.protocol.membership import NO_GENERATION, LogPosition, LostWorker, StateReport
from parallel3d.elastic.protocol.state_machine import MAX_CHANGES_WITHOUT_STEP, MembershipProtocol
from parallel3d.errors import ProtocolError
from parallel3d.parallel.grid import Grid
from tests.support.protocol_steps import (
    GRID,
    agree,
    confirm_all,
    encode_position,
    make,
    make_report,
    on_lost,
    report_all,
    send_entries,
    started,
)
from tests.support.protocol_world import freeze

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
    assert record.position == LogPosition(iteration=7)
    assert (opened.base.generation, opened.behind, opened.entries) == (0, (), b"")  # nobody lacks the entry
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
def test_a_further_loss_restarts_the_change_from_the_committed_shard_map(stage_of_change: str):
    protocol = started()
    on_lost(protocol, 2)
    if stage_of_change == "reported by some":
        protocol.report(make_report(protocol, 0))
    else:
        report_all(protocol)
    if stage_of_change == "confirmed by some":
        protocol.confirm(0, 1, "plan")
    assert on_lost(protocol, 5) == [AbortGeneration(ranks=(0, 1, 3, 4), generation=2, reason="lost rank 5: killed")]
    for rank in (0, 1, 3, 4):  # messages about generation 1 that were in flight
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


def test_a_spare_stays_a_member_and_its_position_does_not_count():
    protocol = started(Grid.uniform(tp_size=2, pp_size=1, dp_size=3))
    on_lost(protocol, 1)
    agree(protocol)
    on_lost(protocol, 3)
    for rank in (0, 2, 4):
        assert protocol.report(make_report(protocol, rank, 0 if rank == 0 else 20)) == []
    (opened,) = send_entries(protocol, protocol.report(make_report(protocol, 5, 20)))
    assert isinstance(opened, Propose) and opened.behind == ()  # the spare, which has not trained, needs no entry
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
def test_all_continue_from_the_newest_entry(positions: list[tuple[int, int]], newest: tuple[int, int]):
    protocol = started(Grid.uniform(tp_size=1, pp_size=1, dp_size=2))
    protocol.suspect(0, 0, "a link broke")
    actions: list[Action] = []
    for rank, position in enumerate(positions):
        actions = protocol.report(make_report(protocol, rank, *position))
    behind = tuple(rank for rank, position in enumerate(positions) if position < newest)
    fetches = [FetchEntries(rank=positions.index(newest), generation=1)]
    assert not behind or actions == fetches
    (opened,) = send_entries(protocol, actions)
    assert isinstance(opened, Propose) and opened.behind == behind
    assert opened.record.position == LogPosition(iteration=newest[0], evaluation=newest[1])
    assert opened.entries == (encode_position(opened.record.position) if behind else b"")


def test_only_the_entries_that_were_reported_and_asked_for_count():
    def asked() -> MembershipProtocol:
        protocol = started(Grid.uniform(tp_size=1, pp_size=1, dp_size=4))
        on_lost(protocol, 3)
        for rank in (0, 2):
            protocol.report(make_report(protocol, rank, 6))
        assert protocol.report(make_report(protocol, 1, 7)) == [FetchEntries(rank=1, generation=1)]
        return protocol

    with pytest.raises(ProtocolError, match="rank 0 sent entries to generation 1, which it was not asked for"):
        asked().entries(0, 1, b"7 0")
    with pytest.raises(ProtocolError, match="rank 1 sent other entries than those that it reported"):
        asked().entries(1, 1, b"6 0")
    protocol = asked()
    assert on_lost(protocol, 1) == [AbortGeneration(ranks=(0, 2), generation=2, reason="lost rank 1: killed")]
    assert protocol.entries(1, 1, b"7 0") == []  # the holder died after it had sent them
    (opened,) = report_all(protocol, 6)
    assert opened.record.position == LogPosition(iteration=6) and opened.behind == ()


def test_ranks_that_hold_different_entries_end_the_run():
    protocol = started(Grid.uniform(tp_size=1, pp_size=1, dp_size=3))
    protocol.suspect(0, 0, "a link broke")
    for rank in (0, 1):
        protocol.report(make_report(protocol, rank, 7))
    with pytest.raises(ProtocolError, match="ranks 0 and 2 hold different entries at .*7"):
        protocol.report(make_report(protocol, 2, 7, digest="another"))


@pytest.mark.parametrize("positions", [[(5, 0), (7, 0), (7, 0)], [(6, 0), (6, 1), (7, 0)]])
def test_no_worker_can_be_two_entries_behind(positions: list[tuple[int, int]]):
    protocol = started(Grid.uniform(tp_size=1, pp_size=1, dp_size=3))
    protocol.suspect(0, 0, "a link broke")
    with pytest.raises(ProtocolError, match=r"rank 0 at .* is more than one entry behind rank (1|2)"):
        for rank, position in enumerate(positions):
            protocol.report(make_report(protocol, rank, *position))


def test_all_hold_the_committed_shard_map():
    protocol = started(Grid.uniform(tp_size=1, pp_size=1, dp_size=2))
    protocol.suspect(0, 0, "a link broke")
    protocol.report(make_report(protocol, 0))
    with pytest.raises(ProtocolError, match="rank 1 holds the ranges of generation -1; committed is 0"):
        protocol.report(make_report(protocol, 1, state_generation=NO_GENERATION))


# --- messages out of place --------------------------------------------------------------------------------------------


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
    for send in (
        lambda: protocol.confirm(0, 0, "plan"),
        lambda: protocol.confirm(0, 1, "plan"),
        lambda: protocol.suspect(0, 1, "why"),
        lambda: protocol.finish(0, 1),
        lambda: protocol.report(replace(REPORT_TO_NOTHING, generation=0)),
        lambda: protocol.report(replace(REPORT_TO_NOTHING, generation=1)),
    ):
        with pytest.raises(ProtocolError):
            send()
    on_lost(protocol, 2)
    protocol.report(make_report(protocol, 0))
    with pytest.raises(ProtocolError, match="twice"):
        protocol.report(make_report(protocol, 0))
    with pytest.raises(ProtocolError, match="reported from host host0, it was on host1"):
        protocol.report(make_report(protocol, 1, host="host0"))
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


def test_spares_and_draining_workers_make_no_plan():
    protocol = started(Grid.uniform(tp_size=2, pp_size=1, dp_size=3))
    protocol.announce_drain(0)
    on_lost(protocol, 3)
    report_all(protocol)
    for rank, digest in {0: "", 1: "", 2: "", 4: "plan"}.items():
        assert protocol.confirm(rank, 1, digest) == []
    assert protocol.confirm(5, 1, "plan") == [Commit(generation=1, members=(0, 1, 2, 4, 5))]


# --- the end ----------------------------------------------------------------------------------------------------------


def test_no_worker_finishes_before_all_are_done():
    protocol = started(Grid.uniform(tp_size=2, pp_size=1, dp_size=2))
    on_lost(protocol, 0)
    agree(protocol)
    assert protocol.finish(1, 1) == []  # a spare
    assert protocol.finish(2, 1) == protocol.finish(2, 1) == []
    assert protocol.finish(3, 1) == [FinishRun(ranks=(1, 2, 3))]
    assert protocol.over
    assert on_lost(protocol, 3) == protocol.announce_drain(2) == protocol.suspect(2, 1, "late") == []


def test_a_loss_before_the_end_is_a_change():
    protocol = started()
    for rank in range(5):
        protocol.finish(rank, 0)
    assert on_lost(protocol, 5) == [AbortGeneration(ranks=(0, 1, 2, 3, 4), generation=1, reason="lost rank 5: killed")]
    agree(protocol)
    for rank in range(4):
        assert protocol.finish(rank, 1) == []  # their messages in generation 0 do not count
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


def test_holders_are_those_of_the_committed_shard_map():
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
