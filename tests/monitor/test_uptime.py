"""The account of a run from its lines, with and without the lost ones."""

import random

import pytest

from parallel3d.monitor.uptime import MAX_LINES_OF_NOTICES, AttemptEnd, LastReported, RunHistory, recorded_preemptions

DATA_POSITION = {"tokens_read": 64, "cursors": [[0, 3, 1]]}


def steps(first, last, step_s=2.0):
    return [{"step": step, "loss": 1.0, "step_s": step_s} for step in range(first, last + 1)]


def ended(exit_code, attempt_start_step, last_step):
    return {"event": "ended", "exit_code": exit_code, "attempt_start_step": attempt_start_step, "last_step": last_step}


def restart(step, lost_steps, skips_data=False):
    return {"event": "restart", "step": step, "lost_steps": lost_steps, "skips_data": skips_data}


STARTED = {"event": "started", "step": 0, "time": 1000.0}
BEFORE = [*steps(1, 9), ended(0, 0, 9)]
"""Lines of an earlier run, which this one continues."""
FIRST = [{**STARTED, "step": 5}, *steps(6, 8), {"event": "failure", "text": "a loss"}, ended(3, 5, 8), restart(6, 2)]


def test_each_step_counts_once():
    evaluations = [{"event": "evaluation", "step": step, "seconds": 1.0} for step in (6, 8)]
    lost = [*FIRST[:-3], *evaluations, *FIRST[-3:]]
    run_history = RunHistory(
        [*lost, *steps(7, 8, 3.0), {"step": 8, "loss": 1.0, "step_s": 4.0}, {"step": 9, "loss": 1.0}]
    )
    assert run_history.figures(1020.0) == {
        "restarts": 1,
        "lost_steps": 2,
        "productive_s": 2.0 + 1.0 + 3.0 + 4.0,
        "wall_s": 20.0,
        "uptime": 0.5,
    }
    assert run_history.attempt_ends == [AttemptEnd(exit_code=3, attempt_start_step=5, last_step=8)]
    assert (run_history.last_step, run_history.run_start_step, run_history.has_open_attempt) == (9, 5, True)
    assert run_history.end_attempt(0) == AttemptEnd(exit_code=0, attempt_start_step=6, last_step=9)


def test_lines_of_lost_steps_may_be_gone():
    without = [line for line in FIRST if line.get("step") not in (7, 8)]
    assert RunHistory(without).figures(1018.0) == RunHistory(FIRST).figures(1018.0)
    assert RunHistory(without).attempt_ends == RunHistory(FIRST).attempt_ends


def test_an_earlier_runs_lines_do_not_count():
    run_history, alone = RunHistory([*BEFORE, *FIRST]), RunHistory(FIRST)
    assert (run_history.figures(1018.0), run_history.attempt_ends) == (alone.figures(1018.0), alone.attempt_ends)
    assert RunHistory(BEFORE).figures(1018.0) == {} and RunHistory(BEFORE).last_step == 9


def test_the_figures_are_those_of_all_legs():
    """A resume goes on after step 6: later steps and evaluations don't count, nor does the time between the legs."""
    evaluations = [{"event": "evaluation", "step": step, "seconds": 1.0} for step in (6, 7)]
    first = [*FIRST, *steps(7, 8, 3.0), *evaluations, ended(3, 6, 8) | {"time": 1015.0}]
    second = [{**STARTED, "step": 6, "time": 5000.0}, *steps(7, 9, 4.0)]
    run_history = RunHistory([*BEFORE, *first, *second])
    assert run_history.figures() == {
        "restarts": 1,
        "lost_steps": 2,
        "productive_s": 2.0 + 1.0 + 3 * 4.0,
        "wall_s": 15.0 + 12.0,
        "uptime": 15.0 / 27.0,
    }
    assert run_history.figures(5100.0)["wall_s"] == 115.0 and run_history.evaluation_times_s == [1.0]
    assert (run_history.run_start_step, run_history.history_start_step, run_history.last_evaluation) == (6, 5, -1)
    assert run_history.has_open_attempt and run_history.attempt_ends == []
    run_history.log(restart(6, 3))
    assert run_history.figures()["productive_s"] == 3.0 and run_history.figures()["restarts"] == 2


def test_a_restart_from_before_the_leg_takes_its_steps_back():
    lines = [STARTED, *steps(1, 4), {**STARTED, "step": 4}, *steps(5, 6), ended(6, 4, 6), restart(2, 4)]
    assert RunHistory(lines).figures()["productive_s"] == 2 * 2.0


def test_whether_a_start_is_over_and_why():
    assert RunHistory(FIRST[:-3]).has_open_attempt and not RunHistory(FIRST[:-3]).failure
    assert RunHistory(FIRST[:-2]).has_open_attempt and RunHistory(FIRST[:-2]).failure == "a loss"
    assert not RunHistory(FIRST[:-1]).has_open_attempt and not RunHistory().has_open_attempt


@pytest.mark.parametrize("skips_data", [True, False])
def test_data_that_led_into_a_divergence(skips_data):
    diverged = RunHistory(
        [STARTED, *steps(1, 7), {"event": "diverged", "step": 7, "data": DATA_POSITION}, ended(6, 0, 7)]
    )
    assert (
        diverged.data_position_after(4, skips_data=True) == DATA_POSITION
        and diverged.data_position_after(4, skips_data=False) is None
    )
    diverged.log(restart(4, 3, skips_data))
    for step, data_position in [
        (2, DATA_POSITION),
        (4, DATA_POSITION),
        (5, None),
    ]:  # a checkpoint of step 5 stands behind it
        assert diverged.data_position_after(step, skips_data=False) == (data_position if skips_data else None)
    assert diverged.data_position_after(5, skips_data=True) is None  # nothing new has diverged


def random_lines(seed):
    """A run's lines: attempts, evaluations, other events; those of lost steps are there or not."""
    numbers, lines, at, is_rewound = random.Random(seed), [], 0, seed % 2
    for _ in range(numbers.randrange(60)):
        kind = numbers.choice(["step"] * 8 + ["evaluation"] * 2 + ["notice", "restart", "started"])
        if kind == "step":
            at += 1
            lines.append({"step": at, "loss": 1.0, "step_s": 2.0})
        elif kind == "evaluation":
            seconds = {"seconds": 1.0} if numbers.random() < 0.8 else {}
            lines.append({"event": kind, "step": at, "loss": 1.0, **seconds})
        elif kind == "started":
            lines.append({"event": kind, "step": at, "time": 1.0})
        elif kind == "restart":
            at = numbers.randrange(at + 1)
            keeps = [line for line in lines if line.get("event", "evaluation") != "evaluation" or line["step"] <= at]
            lines = [*(keeps if is_rewound else lines), restart(at, 1)]
        else:
            lines.append({"event": kind, "text": "a"})
    return lines


@pytest.mark.parametrize("seed", range(300))
def test_the_end_says_what_was_reported_last(seed):
    lines = random_lines(seed)
    run_history = RunHistory(lines)
    expected = LastReported(step=run_history.last_step, evaluation=run_history.last_evaluation)
    assert LastReported.of(reversed(lines)) == expected


@pytest.mark.parametrize("every, evaluation, num_read", [(1, 10_000, 2), (80, 9_950, 51), (10**6, -1, 4096)])
def test_only_the_end_is_read_for_it(every, evaluation, num_read):
    """As far as the newest evaluation that a worker could repeat; without any no further than its records go back."""
    lines = []
    for line in steps(1, 10_000):
        is_evaluated = (line["step"] - 9_950) % every == 0 and every < 10**6
        lines += [line, *([{"event": "evaluation", "step": line["step"], "seconds": 1.0}] if is_evaluated else [])]
    lines = [{"event": "evaluation", "step": 0, "seconds": 1.0}, *lines]
    backwards = reversed(lines)
    assert LastReported.of(backwards) == LastReported(step=10_000, evaluation=evaluation)
    assert len(lines) - len(list(backwards)) == num_read


def test_the_notices_of_hosts_are_found_from_the_end():
    """Those of this run alone, and of the newest lines."""
    told = (("a", [0]), ("a", [2]), ("b", []))
    notices = [{"event": "preemption", "host": host, "ranks": ranks} for host, ranks in told]
    before = {"event": "preemption", "host": "c", "ranks": [9]}
    lines = [before, {"event": "started", "step": 0}, *notices, {"step": 1}]
    assert recorded_preemptions(reversed(lines)) == {"a": {0, 2}, "b": set()}
    assert recorded_preemptions([{"step": 1}] * MAX_LINES_OF_NOTICES + notices) == {}
