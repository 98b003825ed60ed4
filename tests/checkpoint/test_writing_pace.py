"""A writer's breaks."""

import threading
import time

from parallel3d.checkpoint.write import Pace


class Clock:
    """Counts what the test says was worked; breaks take no time on it."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def break_after(pace, clock, work_s):
    clock.now_s += work_s
    started = time.perf_counter()
    pace.rest()
    return time.perf_counter() - started


def test_a_fifth_of_the_time_is_work():
    clock = Clock()
    pace = Pace(0.2, clock)
    assert break_after(pace, clock, 3600.0) < 60.0  # waiting for its turn was no work
    assert break_after(pace, clock, 0.01) >= 0.04


def test_no_breaks_where_it_may_work_all_the_time():
    clock = Clock()
    pace = Pace(1.0, clock)
    for _ in range(3):
        assert break_after(pace, clock, 3600.0) < 60.0


def test_whoever_is_in_a_hurry_ends_the_break_and_all_that_would_follow():
    clock = Clock()
    pace = Pace(0.2, clock)
    pace.rest()
    threading.Timer(0.05, pace.hurry).start()
    assert break_after(pace, clock, 3600.0) < 60.0
    assert break_after(pace, clock, 3600.0) < 60.0
