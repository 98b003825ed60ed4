"""The membership protocol rule by rule: suspicions and drains."""

from __future__ import annotations

from parallel3d.elastic.protocol.actions import (
    AbortGeneration,
    ChangeRequest,
    Commit,
    DrainRefused,
    DrainRequest,
    Propose,
)
from parallel3d.parallel.grid import Grid
from tests.support.protocol_steps import (
    GRID,
    agree,
    confirm_all,
    on_lost,
    report_all,
    started,
)


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


def test_a_coordinator_that_hands_over_asks_for_changes_until_another_one_has_taken_over():
    protocol = started()
    assert protocol.request_hand_over() == [ChangeRequest(rank=0, generation=0)]
    on_lost(protocol, 4)
    assert protocol.request_hand_over() == []  # this change will do
    report_all(protocol)
    assert confirm_all(protocol)[-1] == ChangeRequest(rank=0, generation=1)


def test_a_draining_worker_hands_over_and_leaves_with_the_commit():
    protocol = started()
    assert protocol.announce_drain(4) == [DrainRequest(rank=4)]
    assert protocol.announce_drain(4) == []
    protocol.suspect(4, 0, "leaves")  # its step boundary
    record = agree(protocol)
    assert record.draining == (4,) and record.members == GRID.ranks and record.grid.ranks == (0, 1, 2, 3, 5)
    assert record.spares == ()
    assert protocol.live == {0, 1, 2, 3, 5} and on_lost(protocol, 4) == []


def test_a_draining_worker_leaves_with_any_change():
    protocol = started()
    protocol.announce_drain(4)
    on_lost(protocol, 0)
    assert agree(protocol).draining == (4,)


def test_a_draining_worker_that_dies_before_the_commit_is_a_loss():
    protocol = started()
    protocol.announce_drain(4)
    protocol.suspect(4, 0, "leaves")
    report_all(protocol)
    assert isinstance(on_lost(protocol, 4)[0], AbortGeneration)
    record = agree(protocol)
    assert record.draining == () and [loss.rank for loss in record.evicted] == [4]


def test_a_drain_announced_after_the_record_comes_with_the_next_change():
    protocol = started()
    on_lost(protocol, 0)
    report_all(protocol)
    assert protocol.announce_drain(4) == [DrainRequest(rank=4)]
    confirm_all(protocol)
    assert 4 in protocol.live
    protocol.suspect(4, 1, "leaves")
    assert agree(protocol).draining == (4,)


def test_the_drain_of_an_indispensable_worker_is_refused():
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
    assert len(report_all(protocol)) == 1  # refused once


def test_a_spare_leaves_at_the_next_step_boundary():
    protocol = started(Grid.uniform(tp_size=2, pp_size=1, dp_size=2))
    on_lost(protocol, 0)
    agree(protocol)
    assert protocol.announce_drain(1) == [ChangeRequest(rank=2, generation=1)]
    protocol.suspect(2, 1, "a worker leaves")
    assert agree(protocol, 1).draining == (1,)
    assert protocol.live == {2, 3} and protocol.pending is None


def test_a_spare_drains_with_the_pending_change():
    protocol = started(Grid.uniform(tp_size=2, pp_size=1, dp_size=3))
    on_lost(protocol, 0)
    agree(protocol)
    on_lost(protocol, 2)
    assert protocol.announce_drain(1) == []
    assert agree(protocol).draining == (1,)


def test_a_draining_worker_that_becomes_a_spare_leaves_at_the_next_step_boundary():
    protocol = started(Grid.uniform(tp_size=2, pp_size=1, dp_size=2))
    on_lost(protocol, 0)
    report_all(protocol)
    assert protocol.announce_drain(1) == [DrainRequest(rank=1)]
    assert confirm_all(protocol) == [
        Commit(generation=1, members=(1, 2, 3)),
        ChangeRequest(rank=2, generation=1),
    ]


def test_workers_leave_together_by_a_command_at_the_leaders_next_step():
    protocol = started()
    assert protocol.check_drain([2, 4]).can_continue
    assert protocol.drain([2, 4]) == [ChangeRequest(rank=0, generation=0)]
    protocol.suspect(0, 0, "a worker leaves or joins")
    record = agree(protocol)
    assert record.draining == (2, 4) and protocol.live == {0, 1, 3, 5} and protocol.pending is None


def test_a_command_may_not_take_what_the_run_needs_with_those_that_leave_already():
    protocol = started(Grid.uniform(tp_size=1, pp_size=2, dp_size=2))
    protocol.drain([0])
    assert protocol.check_drain([1]).reason == (
        "stage 0 has no replica left: lost pp0 dp0 tp0 (rank 0) and pp0 dp1 tp0 (rank 1)"
    )
    assert protocol.check_drain([2]).can_continue


def test_a_drain_by_command_after_the_record_comes_with_the_next_change():
    protocol = started()
    on_lost(protocol, 0)
    report_all(protocol)
    assert protocol.drain([4]) == []
    assert confirm_all(protocol)[-1] == ChangeRequest(rank=1, generation=1)
    protocol.suspect(1, 1, "a worker leaves or joins")
    assert agree(protocol).draining == (4,)


def test_a_spare_leaves_by_a_command_at_the_next_step_boundary():
    protocol = started(Grid.uniform(tp_size=2, pp_size=1, dp_size=2))
    on_lost(protocol, 0)
    agree(protocol)
    assert protocol.drain([1]) == [ChangeRequest(rank=2, generation=1)]
    protocol.suspect(2, 1, "a worker leaves or joins")
    assert agree(protocol).draining == (1,)


def test_a_drain_by_command_is_refused_when_a_death_comes_first():
    protocol = started(Grid.uniform(tp_size=1, pp_size=1, dp_size=2))
    protocol.drain([1])
    on_lost(protocol, 0)
    refused, _ = report_all(protocol)
    assert isinstance(refused, DrainRefused) and refused.rank == 1
    assert [type(action) for action in confirm_all(protocol)] == [Commit]  # and no further change is asked for
