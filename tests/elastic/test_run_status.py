from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parallel3d.elastic.coordinator.run_status import Failure, RunOutcome, RunStatus, describe_error, root_cause
from parallel3d.errors import DataError, GenerationEnded
from parallel3d.parallel.grid import Grid


def status_of_two() -> RunStatus:
    status = RunStatus(2)
    for rank in (0, 1):
        status.record_hello(rank, host="here", log=f"logs/rank-{rank}.log")
        status.add_record(rank, {"kind": "hello", "coordinates": f"pp{rank} dp0 tp0"})
    return status


def test_success():
    status = status_of_two()
    status.record_exit(0, exit_code=0, by_guardian=False)
    assert not status.over
    status.record_exit(1, exit_code=0, by_guardian=False)
    assert status.over and status.outcome() == RunOutcome(exit_code=0)


def test_a_peers_complaint_that_comes_first_is_not_the_cause():
    status = status_of_two()
    status.record_error(0, describe_error(RuntimeError("Connection closed by peer [127.0.0.1]:40404")))
    status.record_step(1, 7)
    status.record_exit(1, exit_code=-9, by_guardian=False)
    message = "rank 1 (pp1 dp0 tp0) was killed by SIGKILL in step 7\n  log: logs/rank-1.log"
    assert status.outcome() == RunOutcome(exit_code=3, message=message)


def test_the_first_of_two_causes_wins():
    status = status_of_two()
    status.record_error(1, describe_error(DataError("no text")))
    status.record_exit(0, exit_code=-6, by_guardian=False)
    assert status.outcome().exit_code == 2 and "DataError: no text" in status.outcome().message


def test_the_step_of_a_rank_that_does_not_tell_follows_the_runs():
    status = status_of_two()
    status.add_record(0, {"kind": "step", "step": 4, "loss": 1.0})
    status.record_exit(1, exit_code=-11, by_guardian=False)
    assert "rank 1 (pp1 dp0 tp0) was killed by SIGSEGV in step 5" in status.outcome().message


def test_the_exit_that_follows_a_reported_error_says_nothing_new():
    status = status_of_two()
    status.record_error(0, describe_error(ValueError("bad")))
    status.record_exit(0, exit_code=1, by_guardian=False)
    assert len(status.failures) == 1


def test_who_comes_back_too_late_reads_why_the_run_goes_on_without_it():
    status = status_of_two()
    status.record_step(1, 7)
    status.record_survived_loss(status.lost_with_guardian(1))
    assert status.why_without([1]) == (
        "the run goes on without this process: rank 1 (pp1 dp0 tp0) was lost in step 7: its guardian on here is gone"
        "\n  log: logs/rank-1.log"
    )
    status.mark_gone([0])
    assert status.why_without([0]).endswith("it was taken for lost before this coordinator took over")


def test_logs_on_several_hosts_say_which():
    status = status_of_two()
    status.record_hello(1, host="there", log="logs/rank-1.log")
    status.record_exit(1, exit_code=4, by_guardian=False)
    assert status.outcome().message.endswith(
        "ended with exit code 4 before the first step\n  log: there:logs/rank-1.log"
    )


def test_what_the_guardian_kills_after_a_stop_is_no_failure():
    status = status_of_two()
    status.add_record(0, {"kind": "step", "step": 9})
    status.record_stop_signal(15)
    status.record_stop_signal(2)
    for rank in (0, 1):
        status.record_exit(rank, exit_code=-9, by_guardian=True)
    assert status.outcome() == RunOutcome(exit_code=143, message="stopped after step 9")


def test_losses_that_the_run_survives_are_part_of_the_message_when_it_halts():
    status = RunStatus(4, Grid.uniform(tp_size=1, pp_size=2, dp_size=2))
    status.record_hello(3, host="there", log="logs/rank-3.log")
    status.add_record(0, {"kind": "step", "step": 4})
    status.record_survived_loss(status.lost_by_signal(2, 9))
    assert not status.failures
    status.add_record(0, {"kind": "step", "step": 5})
    status.record_survived_loss(status.lost_with_guardian(3))
    status.record_stop_run("stage 1 has no replica left")
    for rank in (0, 1):
        status.record_exit(rank, exit_code=1, by_guardian=False)
    assert status.outcome() == RunOutcome(
        exit_code=3,
        message="the run can't go on: stage 1 has no replica left\n"
        "rank 2 (pp1 dp0 tp0) was killed by SIGKILL in step 5\n"
        "rank 3 (pp1 dp1 tp0) was lost in step 6: its guardian on there is gone\n"
        "  log: logs/rank-3.log",
    )


def test_a_run_that_everybody_was_lost_of_is_no_success():
    status = status_of_two()
    for rank in (0, 1):
        status.record_survived_loss(status.lost_by_signal(rank, 9))
    assert status.over and status.outcome().exit_code == 3


def test_a_worker_may_end_only_when_it_is_not_needed():
    status = status_of_two()
    assert status.is_needed(0) and status.is_needed(1)
    status.mark_done([0])
    assert not status.is_needed(0) and status.is_needed(1)
    status.record_early_exit(1)
    assert status.outcome().exit_code == 3
    assert "rank 1 (pp1 dp0 tp0) ended with exit code 0 before the first step, before the" in status.outcome().message
    status = status_of_two()
    status.record_stop_signal(15)
    assert not status.is_needed(0)


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_root_cause(consequences):
    failures = [
        Failure(rank=rank, exit_code=1, message="", consequence=consequence)
        for rank, consequence in enumerate(consequences)
    ]
    assert root_cause(failures).rank == (consequences.index(False) if False in consequences else 0)


def test_describe_error():
    plain = {"text": "DataError: x", "is_run_wide": False, "exit_code": 2, "consequence": False, "step": 4}
    assert describe_error(DataError("x"), 4) == plain
    assert describe_error(GenerationEnded("y"))["consequence"] and describe_error(BrokenPipeError())["consequence"]
    assert not describe_error(RuntimeError("size mismatch"))["consequence"]
