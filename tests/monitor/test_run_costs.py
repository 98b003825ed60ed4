"""What saves and restarts have cost a run, from hand-made lines of metrics.jsonl."""

from __future__ import annotations

from typing import Any

import pytest

from parallel3d.monitor.run_costs import restart_times_s, save_costs
from parallel3d.monitor.saved_notice import SavedNotice

Line = dict[str, Any]


def steps(first: int, last: int, step_s: float) -> list[Line]:
    return [{"step": step, "step_s": step_s} for step in range(first, last + 1)]


def saved(step: int, **cost: float) -> Line:
    text = str(SavedNotice(step=step, path="runs/a/step", megabytes=1.0))
    return {"event": "notice", "text": text, "time": 1.0, **cost}


def test_a_save_costs_its_snapshot_and_what_slows_the_steps_beside_it():
    lines = [*steps(1, 4, 0.2), *steps(5, 6, 0.25), saved(4, snapshot_s=0.05), *steps(7, 9, 0.2)]
    costs = save_costs(lines)
    assert costs is not None and costs.num_saves == 1
    assert costs.slowdown_s == pytest.approx(0.1) and costs.seconds == pytest.approx(0.15)


def test_steps_are_compared_with_those_since_the_save_before():
    """Steps that grow longer over the run are no cost of its saves."""
    lines = [*steps(1, 5, 0.1), saved(4, snapshot_s=0.01), *steps(6, 8, 0.4), *steps(9, 9, 0.41)]
    costs = save_costs([*lines, saved(8, snapshot_s=0.03), *steps(10, 12, 0.4)])
    assert costs is not None and costs.snapshot_s == pytest.approx(0.02)
    assert costs.slowdown_s == pytest.approx((0.0 + 0.01) / 2)


def test_faster_steps_beside_a_save_do_not_make_it_cheaper_than_its_snapshot():
    costs = save_costs([*steps(1, 4, 0.2), *steps(5, 5, 0.1), saved(4, snapshot_s=0.05)])
    assert costs is not None and costs.slowdown_s == pytest.approx(-0.1) and costs.seconds == 0.05


def test_a_save_without_steps_to_compare_says_so():
    costs = save_costs([saved(4, snapshot_s=0.05), *steps(5, 9, 0.2)])
    assert costs is not None and costs.slowdown_s is None and costs.seconds == 0.05


@pytest.mark.parametrize("lines", [[], steps(1, 5, 0.2), [*steps(1, 4, 0.2), saved(4)]])
def test_a_run_of_which_no_save_was_timed(lines: list[Line]):
    """An older version's lines, and the save at the end of a run, for which no step waits."""
    assert save_costs(lines) is None


def test_lost_steps_are_not_beside_a_save():
    """A restart goes back to step 4: the steps 5 and 6 that follow are the ones beside the next save."""
    back = {"event": "restart", "step": 4, "lost_steps": 4, "time": 5.0}
    lines = [*steps(1, 4, 0.2), *steps(5, 8, 9.0), back, *steps(5, 6, 0.2), *steps(7, 7, 0.3)]
    costs = save_costs([*lines, saved(6, snapshot_s=0.0)])
    assert costs is not None and costs.slowdown_s == pytest.approx(0.1)


FAILURE = {"event": "failure", "text": "", "time": 100.0}
ENDED = {"event": "ended", "time": 103.0, "exit_code": 74, "attempt_start_step": 0, "last_step": 9}
RESTART = {"event": "restart", "step": 4, "time": 104.0}
FIRST = {"step": 5, "step_s": 0.5, "time": 110.5}


@pytest.mark.parametrize(
    "lines, expected",
    [
        ([FAILURE, ENDED, RESTART, FIRST, *steps(6, 7, 0.5)], [10.0]),
        ([ENDED, RESTART, FIRST], [7.0]),
        ([FAILURE, ENDED, RESTART, {**ENDED, "time": 106.0}, RESTART, FIRST], [10.0]),  # the first restart failed
        ([FAILURE, ENDED, RESTART, *steps(5, 6, 0.5)], []),  # an older version's lines
        ([FAILURE, ENDED, {"event": "started", "step": 4}, FIRST], []),  # somebody resumed it by hand
        ([FAILURE, ENDED, RESTART], []),
    ],
)
def test_a_restart_takes_from_the_failure_to_the_first_step(lines: list[Line], expected: list[float]):
    assert list(restart_times_s([*steps(1, 9, 0.5), *lines])) == pytest.approx(expected)
