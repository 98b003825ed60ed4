"""The coordinator of a world of threads: the protocol from the seats' side, hangs that are told at once."""

import time

import pytest

from parallel3d.comm.abort import AbortToken
from parallel3d.elastic.membership import NOTHING, Position, Report
from parallel3d.elastic.thread_table import ThreadTable
from parallel3d.errors import EpochEnded, RunEnded
from parallel3d.testing.threads import DeadlockError, RankDied, ThreadWorld, run_threads
from parallel3d.topology.grid import Grid


def report_of(rank, cut_epoch=NOTHING, iteration=0):
    """make_report for a rank that holds the ranges of `cut_epoch` and the entries up to `iteration`."""
    return lambda epoch: Report(
        rank=rank, epoch=epoch, cut_epoch=cut_epoch, position=Position(iteration=iteration), address=("threads", epoch)
    )


def run_table(body, *, dp_size=2, pp_size=1, zero_backups=1):
    """body(rank, seat, table) on every rank; the results, and the table."""
    grid = Grid.straight(tp_size=1, pp_size=pp_size, dp_size=dp_size)
    world = ThreadWorld(len(grid.ranks))
    table = ThreadTable(world, grid, zero_stage=1, zero_backups=zero_backups)

    def rank_body(rank, world):
        try:
            return body(rank, table.seats[rank], table)
        except RankDied:
            table.lose(rank, "killed")
            raise

    return run_threads(len(grid.ranks), rank_body, world=world), table


def join(seat, rank, *, digest="plan", moved_bytes=0, **held):
    """The record of the next epoch, once it is in force."""
    opening = seat.enter(report_of(rank, **held))
    seat.confirm(opening.record.epoch, digest=digest, moved_bytes=moved_bytes)
    return opening


def test_all_begin_together_and_end_together():
    def body(rank, seat, table):
        assert seat.standing()["committed"] is None
        opening = join(seat, rank, moved_bytes=10 + rank)
        assert seat.standing()["committed"]["epoch"] == opening.record.epoch == 0 and opening.record.previous is None
        time.sleep(0.02 * rank)
        seat.finish()
        assert seat.enter(report_of(rank)) is None
        return opening.record.members

    results, table = run_table(body, dp_size=3)
    assert results == [(0, 1, 2)] * 3
    assert table.moved_bytes == 33 and table.protocol.num_changes == 0 and not table.halted


def test_a_death_ends_the_epoch_of_the_others_at_once():
    """They wait for nothing of the table's: their epoch's token tells them, with the reason."""

    def body(rank, seat, table):
        opening = join(seat, rank)
        if rank == 1:
            raise RankDied("rank 1 dies")
        deadline = time.monotonic() + 5
        while not opening.token.aborted and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(EpochEnded, match="lost rank 1: killed"):
            opening.token.check()
        record = join(seat, rank, cut_epoch=0).record
        seat.finish()
        return record.epoch, record.members, [loss.rank for loss in record.evicted]

    results, table = run_table(body, dp_size=3)
    assert results == [(1, (0, 2), [1]), None, (1, (0, 2), [1])] and table.protocol.num_changes == 1


def test_a_death_before_all_have_confirmed_begins_anew():
    def body(rank, seat, table):
        if rank == 2:
            seat.enter(report_of(rank))
            raise RankDied("rank 2 dies")
        opening = seat.enter(report_of(rank))
        if opening.record.epoch == 0:
            with pytest.raises(EpochEnded, match="lost rank 2: killed"):
                seat.confirm(0, digest="plan", moved_bytes=0)
            opening = seat.enter(report_of(rank))
        seat.confirm(1, digest="plan", moved_bytes=0)
        seat.finish()
        return opening.record.members

    results, table = run_table(body, dp_size=3)
    assert results == [(0, 1), (0, 1), None] and table.protocol.num_changes == 0


def test_what_can_not_go_on_ends_every_wait_with_the_reason():
    def body(rank, seat, table):
        join(seat, rank)
        if rank == 1:
            raise RankDied("rank 1 dies")
        with pytest.raises(RunEnded, match="range 1 of the optimizer state of stage 0, tp 0 has no holder left"):
            seat.finish()
            seat.enter(report_of(rank, cut_epoch=0))
        return "told"

    results, table = run_table(body, zero_backups=0)
    assert results == ["told", None] and "elastic.zero_backups is 0" in table.halted and table.run_token.aborted


def test_different_plans_end_the_run():
    def body(rank, seat, table):
        opening = seat.enter(report_of(rank))
        with pytest.raises(RunEnded, match="ranks 0 and 1 made different plans for epoch 0"):
            seat.confirm(opening.record.epoch, digest=f"plan {rank}", moved_bytes=0)

    run_table(body)


def test_who_is_asked_to_leave_departs_with_the_next_change():
    def body(rank, seat, table):
        join(seat, rank)
        if rank == 0:
            table.ask_to_leave(0)
            assert table.departing == {0}
        opening = seat.enter(report_of(rank, cut_epoch=0), suspicion="rank 0 leaves")
        record = opening.record
        seat.confirm(record.epoch, digest="plan" if record.grid.holds(rank) else "", moved_bytes=0)
        if rank != 0:
            seat.finish()
        return record.leavers, record.grid.ranks

    results, _ = run_table(body, dp_size=3)
    assert results == [((0,), (1, 2))] * 3


def test_a_recovery_that_hangs_is_told_at_once():
    """Rank 1 waits for a message instead of reporting: nobody can move, and the table of waits says who is where."""

    def body(rank, seat, table):
        join(seat, rank)
        if rank == 2:
            raise RankDied("rank 2 dies")
        if rank == 1:
            table._world.wait(1, lambda: False, lambda: "for a message", token=AbortToken())
        seat.enter(report_of(rank, cut_epoch=0))

    started = time.monotonic()
    with pytest.raises(DeadlockError, match="(?s)rank 0 .* waits for the coordinator.*rank 1 .* waits for a message"):
        run_table(body, dp_size=3)
    assert time.monotonic() - started < 5
