"""What follows the end of a start, as a table, and what must hold whatever has happened."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.elastic.protocol.restart_policy import (
    Restart,
    RestartPolicy,
    StartInstruction,
    Stop,
    choose_step,
    decide,
    wait_before,
)
from parallel3d.monitor.uptime import AttemptEnd

POLICY = RestartPolicy(max_restarts=3, backoff_s=1.0, max_backoff_s=5.0)
LOST, DIVERGED, RAISED = 3, 6, 1


def end(exit_code, attempt_start_step=0, last_step=9):
    return AttemptEnd(exit_code=exit_code, attempt_start_step=attempt_start_step, last_step=last_step)


def restart(step, wait_s=1.0):
    return Restart(step=step, wait_s=wait_s)


NO_MORE = Stop()
TABLE = {
    "all is well": ([end(0)], [4, 8], NO_MORE),
    "a mistake in the input": ([end(2)], [4, 8], NO_MORE),
    "the coordinator is lost": ([end(4)], [4, 8], NO_MORE),
    "copies differ": ([end(5)], [4, 8], NO_MORE),
    "its hosts are taken away": ([end(7)], [4, 8], NO_MORE),
    "Ctrl-C": ([end(130)], [4, 8], NO_MORE),
    "workers are lost": ([end(LOST)], [4, 8], restart(8)),
    "workers are lost before a checkpoint": ([end(LOST)], [], restart(0)),
    "workers are lost in vain": ([end(LOST), end(LOST, 8, 9), end(LOST, 8, 8)], [4, 8], restart(8, 4.0)),
    "workers are lost after some way": ([end(LOST), end(LOST, 8, 30)], [24, 28], restart(28)),
    "too often": ([end(LOST), end(LOST, 8), end(LOST, 8), end(LOST, 8)], [8], "restarted 3 times, as often as"),
    "an exception": ([end(RAISED)], [4, 8], restart(8)),
    "an exception at once": ([end(RAISED, 8, 8)], [4, 8], "before completing a step"),
    "an exception again": ([end(RAISED), end(RAISED, 8, 9)], [4, 8], "failed at the same step before, after step 9"),
    "an exception elsewhere": ([end(RAISED), end(RAISED, 8, 11)], [4, 8], restart(8)),
    "a divergence": ([end(DIVERGED)], [4, 8], restart(8)),
    "a divergence before a checkpoint": ([end(DIVERGED)], [], restart(0)),
    "a divergence again": ([end(DIVERGED), end(DIVERGED, 8, 10)], [4, 8], restart(4)),
    "from a checkpoint before the first one": ([end(DIVERGED), end(DIVERGED, 8, 11)], [4, 8, 9], restart(4)),
    "a third time": (
        [end(DIVERGED), end(DIVERGED, 8, 9), end(DIVERGED, 4, 9)],
        [4],
        "no checkpoint is left from before",
    ),
    "another divergence": ([end(DIVERGED), end(DIVERGED, 8, 30)], [20, 28], restart(28)),
    "a loss after a divergence": ([end(DIVERGED), end(LOST, 8, 9)], [4, 8], restart(8, 2.0)),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_table(case):
    attempt_ends, checkpoints, expected = TABLE[case]
    decision = decide(POLICY, attempt_ends, checkpoints, run_start_step=0)
    if isinstance(expected, str):
        assert isinstance(decision, Stop) and expected in decision.why
    else:
        assert decision == expected


def test_without_restarts_a_run_that_fails_says_how_to_go_on():
    off = RestartPolicy(max_restarts=0, backoff_s=1.0, max_backoff_s=5.0)
    assert (
        "run.resume=auto resumes from the checkpoint of step 8"
        in decide(off, [end(LOST)], [4, 8], run_start_step=0).why
    )
    assert "no checkpoint" in decide(off, [end(LOST)], [], run_start_step=0).why
    assert decide(off, [end(0)], [4], run_start_step=0) == NO_MORE


def test_a_run_that_was_resumed_begins_again_where_it_did():
    assert decide(POLICY, [end(LOST, 20, 22)], [], run_start_step=20) == restart(20)


def test_an_order_survives_its_journey():
    start_instruction = StartInstruction(
        attempt=2, checkpoint="here/step-00000008", data={"tokens_read": 4, "cursors": [[0, 1, 2]]}
    )
    assert (
        StartInstruction.from_json(start_instruction.to_json()) == start_instruction
        and StartInstruction.from_json(StartInstruction().to_json()) == StartInstruction()
    )


@st.composite
def histories(draw):
    attempt_ends = []
    for _ in range(draw(st.integers(1, 6))):
        attempt_start_step = draw(st.integers(0, 20))
        attempt_ends.append(
            end(
                draw(st.sampled_from([LOST, DIVERGED, RAISED])),
                attempt_start_step,
                attempt_start_step + draw(st.integers(0, 9)),
            )
        )
    return attempt_ends, sorted(draw(st.sets(st.integers(1, 25))))


@given(histories())
def test_whatever_has_happened(history):
    """Restarts keep their limit, waits their bounds; each restart is from an existing checkpoint or from the start."""
    attempt_ends, checkpoints = history
    decision = decide(POLICY, attempt_ends, checkpoints, run_start_step=0)
    if isinstance(decision, Restart):
        assert len(attempt_ends) <= POLICY.max_restarts
        assert decision.step in checkpoints or (decision.step == 0 and not checkpoints)
        assert POLICY.backoff_s <= decision.wait_s <= POLICY.max_backoff_s
    else:
        assert decision.why


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_divergences_without_end_go_back_further_each_time(ways):
    """However far each start comes: without a checkpoint from beyond, they end."""
    checkpoints, attempt_ends, attempt_start_step = list(range(10, 60, 10)), [], 50
    for way in ways:
        attempt_ends.append(end(DIVERGED, attempt_start_step, min(59, attempt_start_step + way)))
        step = choose_step(attempt_ends, checkpoints, run_start_step=0)
        if step is None:
            assert attempt_start_step == checkpoints[0]
            return
        assert step == 50 if len(attempt_ends) == 1 else step < attempt_start_step
        attempt_start_step, checkpoints = step, [known for known in checkpoints if known <= step]


def test_waits_double_until_the_run_gets_on():
    ends = [end(LOST, 0, last_step) for last_step in (9, 9, 4, 9, 10, 10)]
    waits = [wait_before(POLICY, ends[: number + 1]) for number in range(len(ends))]
    assert waits == [1.0, 2.0, 4.0, 5.0, 1.0, 2.0]
