"""The account of a change of membership, by a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel3d.elastic.coordinator.recovery_log import STAY_AWAY, RecoveryLog
from parallel3d.elastic.protocol.membership import GenerationRecord, LogPosition, LostWorker
from parallel3d.parallel.grid import Grid

GRID = Grid.uniform(tp_size=2, pp_size=1, dp_size=4)  # ranks 0 1 | 2 3 | 4 5 | 6 7
DONE, BEHIND = LogPosition(iteration=7), LogPosition(iteration=6)


def record(generation: int, *lost: int, left: tuple[int, ...] = (), previous: Grid | None = GRID) -> GenerationRecord:
    return GenerationRecord(
        generation=generation,
        grid=GRID.without({*lost, *left})[0],
        previous=previous,
        members=tuple(rank for rank in GRID.ranks if rank not in lost),
        draining=left,
        evicted=tuple(LostWorker(rank=rank, why=f"killed (rank {rank})") for rank in lost),
        position=DONE,
        reason="in words",
    )


def change(recovery_log: RecoveryLog, made: GenerationRecord, *, at_s: float, behind: tuple[int, ...] = ()) -> None:
    """Agreed 1 s, confirmed 3 s after `at_s`."""
    for rank in made.members:
        recovery_log.record_report(rank, BEHIND if rank in behind else DONE)
    recovery_log.add_record(made, at_s + 1.0)
    for rank in made.members:
        recovery_log.record_confirm(rank, 2**20)
    recovery_log.record_commit(at_s + 3.0)


def test_a_further_loss_belongs_to_the_same_change():
    recovery_log = RecoveryLog(GRID)
    assert recovery_log.begin(100.0, detect_s=[0.25]) == []
    recovery_log.record_report(0, BEHIND)
    recovery_log.record_confirm(4, 10**12)  # it is lost before the others have confirmed
    assert recovery_log.begin(101.0, detect_s=[0.5, 0.125]) == []
    change(recovery_log, record(2, 3, 4), at_s=101.0)
    (line,) = recovery_log.record_resumed(2, regroup_s=0.5, plan="a plan")
    assert line == {
        "kind": "membership",
        "text": "generation 2: lost rank 3 (pp0 dp1 tp1): killed (rank 3); lost rank 4 (pp0 dp2 tp0): killed (rank 4); "
        "4 live, 2 spare, 2 lost; back in 5.00 s (noticed 0.50, agreed 2.00, repaired 2.00, regrouped 0.50), "
        "6.0 MiB moved; a plan",
        "live": 4,
        "spare": 2,
        "lost": 2,
        "places": 8,
        "widths": [2],
    }
    (account,) = recovery_log.record_step(0.75)
    assert account == {
        "event": "membership",
        "generation": 2,
        "step": 8,
        "who": [{"rank": 3, "coordinates": "pp0 dp1 tp1"}, {"rank": 4, "coordinates": "pp0 dp2 tp0"}],
        "joined": [],
        "why": "in words",
        "detect_s": 0.5,
        "agree_s": 2.0,
        "repair_s": 2.0,
        "regroup_s": 0.5,
        "first_step_s": 0.75,
        "moved_bytes": 6 * 2**20,
        "forward_or_back": "back",
        "live": 4,
        "spare": 2,
        "lost": 2,
        "places": 8,
        "widths_before": [4],
        "widths": [2],
        "plan": "a plan",
    }
    assert recovery_log.record_step(0.75) == [] and recovery_log.close() == []


def test_forward_when_a_worker_of_the_grid_lacked_the_newest_entry():
    for behind, grid, expected in (((), GRID, "back"), ((5,), GRID, "forward"), ((2,), GRID.without([3])[0], "back")):
        recovery_log = RecoveryLog(GRID)
        recovery_log.begin(0.0)
        change(recovery_log, record(1, 3, previous=grid), at_s=0.0, behind=behind)  # rank 2: a spare since long
        assert recovery_log.close()[0]["forward_or_back"] == expected


def test_those_that_leave_and_suspicions():
    recovery_log = RecoveryLog(GRID)
    recovery_log.begin(0.0)
    change(recovery_log, record(1, left=(0, 1)), at_s=0.0)
    text = recovery_log.record_resumed(1, regroup_s=0.01, plan="")[0]["text"]
    assert text.startswith(
        "generation 1: rank 0 (pp0 dp0 tp0) has left; rank 1 (pp0 dp0 tp1) has left; 6 live, 0 spare, 2 "
    )
    assert text.endswith("regrouped 0.010), 8.0 MiB moved")
    recovery_log.begin(0.0)
    change(recovery_log, record(2), at_s=0.0)
    assert recovery_log.record_resumed(2, regroup_s=0.0, plan="")[0]["text"].startswith(
        "generation 2: in words; 8 live"
    )


def test_those_that_join_and_the_loss_of_one_that_has():
    """8 takes the place of 3 in the same replica; then it is lost itself, and 9, which never had a place, with it."""
    recovery_log, broken = RecoveryLog(GRID), GRID.without([3])[0]
    whole = broken.with_replica((0, 1), (2, 8))
    recovery_log.begin(0.0)
    change(recovery_log, replace(record(2, previous=broken), grid=whole), at_s=0.0)
    (line,) = recovery_log.record_resumed(2, regroup_s=0.0, plan="")
    assert line["text"].startswith("generation 2: rank 2 (pp0 dp1 tp0) joins; rank 8 (pp0 dp1 tp1) joins; 8 live, ")
    (account,) = recovery_log.close()
    assert account["joined"] == [{"rank": 2, "coordinates": "pp0 dp1 tp0"}, {"rank": 8, "coordinates": "pp0 dp1 tp1"}]
    assert (account["who"], account["live"], account["lost"]) == ([], 8, 0)
    recovery_log.begin(0.0)
    change(recovery_log, record(3, 8, 9, previous=whole), at_s=0.0)
    assert recovery_log.close()[0]["who"] == [
        {"rank": 8, "coordinates": "pp0 dp1 tp1"},
        {"rank": 9, "coordinates": ""},
    ]


@pytest.mark.parametrize(
    ("widths", "lost"),
    [([2, 2], 0), ([3, 2], 0), ([3, 1], 1), ([1, 1], 2), ([2, 1], 1), ([1, 3], 1)],
)
def test_a_stage_that_has_grown_does_not_hide_that_another_one_lacks_a_replica(widths: list[int], lost: int):
    recovery_log = RecoveryLog(Grid.uniform(tp_size=1, pp_size=2, dp_size=2))
    recovery_log.begin(0.0)
    grid = Grid.of_replicas(widths, tp_size=1)
    change(recovery_log, replace(record(1), grid=grid, members=grid.ranks), at_s=0.0)
    (line,) = recovery_log.record_resumed(1, regroup_s=0.0, plan="")
    assert (line["live"], line["lost"], line["places"], line["widths"]) == (sum(widths), lost, 4, widths)
    assert f"{sum(widths)} live, 0 spare, {lost} lost" in line["text"]


def test_a_change_whose_leader_is_lost_before_it_trains_is_told_with_the_next():
    recovery_log = RecoveryLog(GRID)
    recovery_log.begin(0.0, detect_s=[0.1])
    change(recovery_log, record(1, 3), at_s=0.0)
    (account,) = recovery_log.begin(10.0)
    assert account["generation"] == 1 and account["regroup_s"] is None and account["first_step_s"] is None
    assert recovery_log.record_resumed(1, regroup_s=0.5, plan="") == [] == recovery_log.record_step(1.0)
    change(recovery_log, record(2, 3, 4), at_s=10.0)
    (account,) = recovery_log.close()
    assert account["generation"] == 2 and account["detect_s"] is None and account["agree_s"] == 1.0


def test_a_change_that_is_never_committed_and_the_start_are_not_told():
    recovery_log = RecoveryLog(GRID)
    change(recovery_log, record(0, previous=None), at_s=0.0)
    assert recovery_log.close() == [] == recovery_log.record_step(1.0)
    recovery_log.begin(0.0)
    recovery_log.add_record(record(1, 3), 1.0)
    assert recovery_log.close() == []


def test_the_first_loss_alone_says_how_lost_workers_return():
    """Not one whose replica goes on, nor a worker that leaves, nor where they do return."""
    for returns, hints in ((False, [[], [STAY_AWAY], []]), (True, [[], [], []])):
        recovery_log, previous, found = RecoveryLog(GRID, returns=returns), GRID, []
        for generation, made in enumerate([record(1, left=(7,)), record(2, 3), record(3, 3, 4)], start=1):
            recovery_log.begin(10.0 * generation)
            change(recovery_log, replace(made, previous=previous), at_s=10.0 * generation)
            _, *others = recovery_log.record_resumed(generation, regroup_s=0.5, plan="")
            assert all(line["kind"] == "notice" for line in others)
            found.append([line["text"] for line in others])
            previous = made.grid
        assert found == hints
    assert "elastic.max_rejoins is 0" in STAY_AWAY
