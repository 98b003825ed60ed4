"""The coordinator of ranks that are threads: the membership clients' side of the protocol, hangs reported at once."""

import time

import pytest

from parallel3d.elastic.protocol.membership import NO_GENERATION, LogPosition, StateReport
from parallel3d.errors import GenerationEnded, RunEnded
from parallel3d.inprocess.scheduler import DeadlockError, RankDied
from parallel3d.inprocess.thread_coordinator import ThreadCoordinator
from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.parallel.abort import AbortToken
from tests.support import tiny_runs


def report_of(rank, state_generation=NO_GENERATION, iteration=0):
    """make_report for a rank that holds the ranges of `state_generation` and the entries up to `iteration`."""
    return lambda generation: StateReport(
        rank=rank,
        generation=generation,
        state_generation=state_generation,
        position=LogPosition(iteration=iteration),
        address=("threads", generation),
    )


def run_with_coordinator(body, *, dp_size=2, pp_size=1, zero_backups=1):
    """Runs body(rank, membership, coordinator) on every rank; returns the results and the coordinator."""
    config = tiny_runs.make_config(
        parallel=dict(pp_size=pp_size, dp_size=dp_size), elastic=dict(zero_backups=zero_backups)
    )
    world = ThreadWorld(pp_size * dp_size)
    coordinator = ThreadCoordinator(world, config)

    def rank_body(rank, world):
        try:
            return body(rank, coordinator.memberships[rank], coordinator)
        except RankDied:
            coordinator.on_lost(rank, "killed")
            raise

    return run_threads(pp_size * dp_size, rank_body, world=world), coordinator


def join(membership, rank, *, digest="plan", moved_bytes=0, **held):
    """The record of the next generation, once it is in force."""
    pending = membership.next_generation(report_of(rank, **held))
    membership.confirm(pending.record.generation, digest=digest, moved_bytes=moved_bytes)
    return pending


def test_all_begin_together_and_end_together():
    def body(rank, membership, coordinator):
        assert membership.membership_state()["committed_generation"] == NO_GENERATION
        pending = join(membership, rank, moved_bytes=10 + rank)
        assert membership.membership_state()["committed_generation"] == pending.record.generation == 0
        assert pending.record.previous is None
        time.sleep(0.02 * rank)
        membership.finish()
        assert membership.next_generation(report_of(rank)) is None
        return pending.record.members

    results, coordinator = run_with_coordinator(body, dp_size=3)
    assert results == [(0, 1, 2)] * 3
    assert coordinator.moved_bytes == 33 and coordinator.protocol.num_changes == 0 and not coordinator.abort_reason


def test_a_death_ends_the_generation_of_the_others_at_once():
    """They do not wait for the coordinator: their generation's token is aborted, with the reason."""

    def body(rank, membership, coordinator):
        pending = join(membership, rank)
        if rank == 1:
            raise RankDied("rank 1 dies")
        deadline = time.monotonic() + 300
        while not pending.token.aborted and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(GenerationEnded, match="lost rank 1: killed"):
            pending.token.check()
        record = join(membership, rank, state_generation=0).record
        membership.finish()
        return record.generation, record.members, [loss.rank for loss in record.evicted]

    results, coordinator = run_with_coordinator(body, dp_size=3)
    assert results == [(1, (0, 2), [1]), None, (1, (0, 2), [1])] and coordinator.protocol.num_changes == 1


def test_a_death_before_all_have_confirmed_begins_anew():
    def body(rank, membership, coordinator):
        if rank == 2:
            membership.next_generation(report_of(rank))
            raise RankDied("rank 2 dies")
        pending = membership.next_generation(report_of(rank))
        if pending.record.generation == 0:
            with pytest.raises(GenerationEnded, match="lost rank 2: killed"):
                membership.confirm(0, digest="plan", moved_bytes=0)
            pending = membership.next_generation(report_of(rank))
        membership.confirm(1, digest="plan", moved_bytes=0)
        membership.finish()
        return pending.record.members

    results, coordinator = run_with_coordinator(body, dp_size=3)
    assert results == [(0, 1), (0, 1), None] and coordinator.protocol.num_changes == 0


def test_what_can_not_go_on_ends_every_wait_with_the_reason():
    def body(rank, membership, coordinator):
        join(membership, rank)
        if rank == 1:
            raise RankDied("rank 1 dies")
        with pytest.raises(RunEnded, match="range 1 of the optimizer state of stage 0, tp 0 has no holder left"):
            membership.finish()
            membership.next_generation(report_of(rank, state_generation=0))
        return "aborted"

    results, coordinator = run_with_coordinator(body, zero_backups=0)
    assert (
        results == ["aborted", None]
        and "elastic.zero_backups is 0" in coordinator.abort_reason
        and coordinator.run_token.aborted
    )


def test_different_plans_end_the_run():
    def body(rank, membership, coordinator):
        pending = membership.next_generation(report_of(rank))
        with pytest.raises(RunEnded, match="ranks 0 and 1 made different plans for generation 0"):
            membership.confirm(pending.record.generation, digest=f"plan {rank}", moved_bytes=0)

    run_with_coordinator(body)


def test_who_is_asked_to_leave_departs_with_the_next_change():
    def body(rank, membership, coordinator):
        join(membership, rank)
        if rank == 0:
            coordinator.announce_drain(0)
            assert coordinator.draining == {0}
        pending = membership.next_generation(report_of(rank, state_generation=0), suspicion="rank 0 leaves")
        record = pending.record
        membership.confirm(record.generation, digest="plan" if record.grid.holds(rank) else "", moved_bytes=0)
        if rank != 0:
            membership.finish()
        return record.draining, record.grid.ranks

    results, _ = run_with_coordinator(body, dp_size=3)
    assert results == [((0,), (1, 2))] * 3


def test_a_recovery_that_hangs_is_told_at_once():
    """Rank 1 waits for a message instead of reporting: no rank can go on, and the hang report names the waits."""

    def body(rank, membership, coordinator):
        join(membership, rank)
        if rank == 2:
            raise RankDied("rank 2 dies")
        if rank == 1:
            coordinator._world.wait(1, lambda: False, lambda: "for a message", token=AbortToken())
        membership.next_generation(report_of(rank, state_generation=0))

    started = time.monotonic()
    with pytest.raises(DeadlockError, match="(?s)rank 0 .* waits for the coordinator.*rank 1 .* waits for a message"):
        run_with_coordinator(body, dp_size=3)
    assert time.monotonic() - started < 30
