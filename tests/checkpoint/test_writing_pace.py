"""A writer's breaks."""

import threading
import time

from parallel3d.checkpoint.write_throttle import WriteThrottle


class Clock:
    """Counts what the test says was worked; breaks take no time on it."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def pause_after(write_throttle, clock, work_s):
    clock.now_s += work_s
    started = time.perf_counter()
    write_throttle.throttle()
    return time.perf_counter() - started


def test_a_fifth_of_the_time_is_work():
    clock = Clock()
    write_throttle = WriteThrottle(0.2, clock)
    assert pause_after(write_throttle, clock, 3600.0) < 60.0  # waiting for its turn does not count as work
    assert pause_after(write_throttle, clock, 0.01) >= 0.04


def test_no_breaks_where_it_may_work_all_the_time():
    clock = Clock()
    write_throttle = WriteThrottle(1.0, clock)
    for _ in range(3):
        assert pause_after(write_throttle, clock, 3600.0) < 60.0


def test_whoever_is_in_a_hurry_ends_the_break_and_all_that_would_follow():
    clock = Clock()
    write_throttle = WriteThrottle(0.2, clock)
    write_throttle.throttle()
    threading.Timer(0.05, write_throttle.stop_throttling).start()
    assert pause_after(write_throttle, clock, 3600.0) < 60.0
    assert pause_after(write_throttle, clock, 3600.0) < 60.0
