"""The seconds that a run is paid for: of all legs, and of no time between them."""

import pytest

from parallel3d.monitor.paid_time import PaidTime


def started(time, step=0):
    return {"event": "started", "step": step, "time": time}


def seconds_of(lines, now=None):
    paid_time = PaidTime()
    for line in lines:
        paid_time.log(line)
    return paid_time.seconds(now)


FIRST = [started(100.0), {"step": 1, "step_s": 2.0}, {"event": "notice", "text": "saved", "time": 104.0}]
STEPS = [{"step": 2, "step_s": 2.0}, {"event": "evaluation", "step": 2, "seconds": 5}, {"step": 3}]


@pytest.mark.parametrize(
    "lines, now, seconds",
    [
        ([], 900.0, 0.0),
        ([{"step": 1, "step_s": 2.0}, {"event": "ended", "time": 50.0}], 900.0, 0.0),  # when it started is not known
        (FIRST, None, 4.0),
        (FIRST, 110.0, 10.0),
        ([*FIRST, *STEPS], None, 11.0),  # it was killed: what was done since the last line with a time
        ([*FIRST, *STEPS, {"event": "ended", "time": 112.0}], None, 12.0),
        ([*FIRST, started(5000.0)], None, 4.0),
        ([*FIRST, started(5000.0), {"step": 2, "step_s": 3.0}], None, 7.0),
        ([*FIRST, started(5000.0), {"step": 2, "step_s": 3.0}], 5010.0, 14.0),
        ([*FIRST, {"event": "left_behind", "step": 1, "seconds": 60.0}, started(5000.0)], 5001.0, 65.0),
        ([*FIRST, started(50.0)], 40.0, 4.0),  # a clock that was set back
    ],
)
def test_the_seconds_of_all_legs(lines, now, seconds):
    assert seconds_of(lines, now) == seconds
