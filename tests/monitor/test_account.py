"""The account of a run as a fold over its lines, lost ones taken out or not."""

import pytest

from parallel3d.monitor.account import Account, Ending

PLACE = {"tokens_read": 64, "cursors": [[0, 3, 1]]}


def steps(first, last, step_s=2.0):
    return [{"step": step, "loss": 1.0, "step_s": step_s} for step in range(first, last + 1)]


def ended(exit_code, began_at, last_step):
    return {"event": "ended", "exit_code": exit_code, "began_at": began_at, "last_step": last_step}


def restart(step, lost_steps, skips_data=False):
    return {"event": "restart", "step": step, "lost_steps": lost_steps, "skips_data": skips_data}


STARTED = {"event": "started", "step": 0, "time": 1000.0}
BEFORE = [*steps(1, 9), ended(0, 0, 9)]
"""Of an earlier run, which this one goes on with."""
FIRST = [{**STARTED, "step": 5}, *steps(6, 8), {"event": "failure", "text": "a loss"}, ended(3, 5, 8), restart(6, 2)]


def test_each_step_counts_once():
    evaluations = [{"event": "evaluation", "step": step, "seconds": 1.0} for step in (6, 8)]
    lost = [*FIRST[:-3], *evaluations, *FIRST[-3:]]
    account = Account([*lost, *steps(7, 8, 3.0), {"step": 8, "loss": 1.0, "step_s": 4.0}, {"step": 9, "loss": 1.0}])
    assert account.figures(1020.0) == {
        "restarts": 1,
        "lost_steps": 2,
        "productive_s": 2.0 + 1.0 + 3.0 + 4.0,
        "wall_s": 20.0,
        "uptime": 0.5,
    }
    assert account.endings == [Ending(exit_code=3, began_at=5, last_step=8)]
    assert (account.last_step, account.origin, account.is_open) == (9, 5, True)
    assert account.end(0) == Ending(exit_code=0, began_at=6, last_step=9)


def test_lines_of_lost_steps_may_be_gone():
    without = [line for line in FIRST if line.get("step") not in (7, 8)]
    assert Account(without).figures(1018.0) == Account(FIRST).figures(1018.0)
    assert Account(without).endings == Account(FIRST).endings


def test_an_earlier_runs_lines_do_not_count():
    account, alone = Account([*BEFORE, *FIRST]), Account(FIRST)
    assert (account.figures(1018.0), account.endings) == (alone.figures(1018.0), alone.endings)
    assert Account(BEFORE).figures(1018.0) == {} and Account(BEFORE).last_step == 9


def test_whether_a_start_is_over_and_why():
    assert Account(FIRST[:-3]).is_open and not Account(FIRST[:-3]).failure
    assert Account(FIRST[:-2]).is_open and Account(FIRST[:-2]).failure == "a loss"
    assert not Account(FIRST[:-1]).is_open and not Account().is_open


@pytest.mark.parametrize("skips_data", [True, False])
def test_data_that_led_into_a_divergence(skips_data):
    diverged = Account([STARTED, *steps(1, 7), {"event": "diverged", "step": 7, "data": PLACE}, ended(6, 0, 7)])
    assert diverged.place_after(4, skips_data=True) == PLACE and diverged.place_after(4, skips_data=False) is None
    diverged.note(restart(4, 3, skips_data))
    for step, place in [(2, PLACE), (4, PLACE), (5, None)]:  # a checkpoint of step 5 stands behind it
        assert diverged.place_after(step, skips_data=False) == (place if skips_data else None)
    assert diverged.place_after(5, skips_data=True) is None  # nothing new has diverged
