"""The account of a change of membership, by a clock that the test moves."""

from __future__ import annotations

from parallel3d.elastic.announce import Chronicle
from parallel3d.elastic.membership import EpochRecord, Loss, Position
from parallel3d.topology.grid import Grid

GRID = Grid.straight(tp_size=2, pp_size=1, dp_size=4)  # ranks 0 1 | 2 3 | 4 5 | 6 7
DONE, BEHIND = Position(iteration=7), Position(iteration=6)


def record(epoch: int, *lost: int, left: tuple[int, ...] = (), previous: Grid | None = GRID) -> EpochRecord:
    return EpochRecord(
        epoch=epoch,
        grid=GRID.without({*lost, *left})[0],
        previous=previous,
        members=tuple(rank for rank in GRID.ranks if rank not in lost),
        leavers=left,
        evicted=tuple(Loss(rank=rank, why=f"killed (rank {rank})") for rank in lost),
        position=DONE,
        reason="in words",
    )


def change(chronicle: Chronicle, made: EpochRecord, *, at_s: float, behind: tuple[int, ...] = ()) -> None:
    """Agreed 1 s, confirmed 3 s after `at_s`."""
    for rank in made.members:
        chronicle.note_report(rank, BEHIND if rank in behind else DONE)
    chronicle.note_record(made, at_s + 1.0)
    for rank in made.members:
        chronicle.note_confirm(rank, 2**20)
    chronicle.note_commit(at_s + 3.0)


def test_a_further_loss_belongs_to_the_same_change():
    chronicle = Chronicle(GRID)
    assert chronicle.begin(100.0, detect_s=[0.25]) == []
    chronicle.note_report(0, BEHIND)
    chronicle.note_confirm(4, 10**12)  # it is lost before the others have confirmed
    assert chronicle.begin(101.0, detect_s=[0.5, 0.125]) == []
    change(chronicle, record(2, 3, 4), at_s=101.0)
    (line,) = chronicle.note_resumed(2, regroup_s=0.5, plan="a plan")
    assert line == {
        "kind": "membership",
        "text": "epoch 2: lost rank 3 (pp0 dp1 tp1): killed (rank 3); lost rank 4 (pp0 dp2 tp0): killed (rank 4); "
        "4 live, 2 spare, 2 lost; back in 5.00 s (noticed 0.50, agreed 2.00, repaired 2.00, regrouped 0.50), "
        "6.0 MiB moved; a plan",
        "live": 4,
        "spare": 2,
        "lost": 2,
    }
    (account,) = chronicle.note_step(0.75)
    assert account == {
        "event": "membership",
        "epoch": 2,
        "step": 8,
        "who": [{"rank": 3, "coordinates": "pp0 dp1 tp1"}, {"rank": 4, "coordinates": "pp0 dp2 tp0"}],
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
        "plan": "a plan",
    }
    assert chronicle.note_step(0.75) == [] and chronicle.close() == []


def test_forward_when_a_worker_of_the_grid_lacked_the_newest_entry():
    for behind, grid, expected in (((), GRID, "back"), ((5,), GRID, "forward"), ((2,), GRID.without([3])[0], "back")):
        chronicle = Chronicle(GRID)
        chronicle.begin(0.0)
        change(chronicle, record(1, 3, previous=grid), at_s=0.0, behind=behind)  # rank 2: a spare since long
        assert chronicle.close()[0]["forward_or_back"] == expected


def test_those_that_leave_and_suspicions():
    chronicle = Chronicle(GRID)
    chronicle.begin(0.0)
    change(chronicle, record(1, left=(0, 1)), at_s=0.0)
    text = chronicle.note_resumed(1, regroup_s=0.01, plan="")[0]["text"]
    assert text.startswith("epoch 1: rank 0 (pp0 dp0 tp0) has left; rank 1 (pp0 dp0 tp1) has left; 6 live, 0 spare, 2 ")
    assert text.endswith("regrouped 0.010), 8.0 MiB moved")
    chronicle.begin(0.0)
    change(chronicle, record(2), at_s=0.0)
    assert chronicle.note_resumed(2, regroup_s=0.0, plan="")[0]["text"].startswith("epoch 2: in words; 8 live")


def test_a_change_whose_leader_is_lost_before_it_trains_is_told_with_the_next():
    chronicle = Chronicle(GRID)
    chronicle.begin(0.0, detect_s=[0.1])
    change(chronicle, record(1, 3), at_s=0.0)
    (account,) = chronicle.begin(10.0)
    assert account["epoch"] == 1 and account["regroup_s"] is None and account["first_step_s"] is None
    assert chronicle.note_resumed(1, regroup_s=0.5, plan="") == [] == chronicle.note_step(1.0)
    change(chronicle, record(2, 3, 4), at_s=10.0)
    (account,) = chronicle.close()
    assert account["epoch"] == 2 and account["detect_s"] is None and account["agree_s"] == 1.0


def test_a_change_that_is_never_committed_and_the_start_are_not_told():
    chronicle = Chronicle(GRID)
    change(chronicle, record(0, previous=None), at_s=0.0)
    assert chronicle.close() == [] == chronicle.note_step(1.0)
    chronicle.begin(0.0)
    chronicle.note_record(record(1, 3), 1.0)
    assert chronicle.close() == []
