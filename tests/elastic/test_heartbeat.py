"""Signs of life: who is given up when, in numbers."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config.schema import ElasticConfig, TimeoutConfig
from parallel3d.elastic.guardian import heartbeat as heartbeat_module
from parallel3d.elastic.guardian.heartbeat import (
    CHECK_INTERVAL_S,
    HEARTBEAT_INTERVAL_S,
    Heartbeat,
    HeartbeatMonitor,
    HeartbeatPage,
    HeartbeatState,
    HeartbeatTimeouts,
    Mode,
    diagnose,
    is_stopped,
    plan_heartbeat_timeouts,
    read_heartbeat,
)
from parallel3d.parallel.abort import Wait

PATIENCE = HeartbeatTimeouts(heartbeat_timeout_s=0.5, watchdog_timeout_s=60.0)


def state(**fields) -> HeartbeatState:
    healthy = {"last_beat_s": 1000.0, "last_instruction_s": 1000.0, "num_instructions": 7, "mode": Mode.RUNNING}
    return HeartbeatState(**{**healthy, "waiting": False, "step": 3, **fields})


def check(after_s: float, *, stopped_s: float | None = None, since_s: float = 0.0, **fields) -> str:
    """The diagnosis at 1000 + `after_s`."""
    return diagnose(state(**fields), PATIENCE, now_s=1000.0 + after_s, since_s=since_s, stopped_s=stopped_s)


def test_heartbeat_timeouts_follow_the_round_trip_between_their_bounds():
    heartbeat_timeout = TimeoutConfig(multiplier=500.0, min_s=0.5, max_s=5.0)
    watchdog_timeout = TimeoutConfig(multiplier=100_000.0, min_s=60.0, max_s=600.0)
    for round_trip_s, heartbeat_timeout_s, watchdog_timeout_s in (
        (0.0003, 0.5, 60.0),
        (0.002, 1.0, 200.0),
        (1.0, 5.0, 600.0),
    ):
        assert plan_heartbeat_timeouts(heartbeat_timeout, watchdog_timeout, round_trip_s) == HeartbeatTimeouts(
            heartbeat_timeout_s=heartbeat_timeout_s, watchdog_timeout_s=watchdog_timeout_s
        )


def test_by_default_the_lower_limits_decide_at_the_round_trips_of_one_host():
    config = ElasticConfig()
    for round_trip_s, heartbeat_timeout_s in ((0.0, 1.0), (0.0004, 1.0), (0.001, 2.5), (0.003, 5.0)):
        assert plan_heartbeat_timeouts(
            config.heartbeat_timeout, config.watchdog_timeout, round_trip_s
        ) == HeartbeatTimeouts(heartbeat_timeout_s=heartbeat_timeout_s, watchdog_timeout_s=300.0)


@pytest.mark.parametrize(
    ("after_s", "facts", "why"),
    [
        (0.49, {"stopped_s": 0.1}, ""),
        (0.51, {"stopped_s": 0.1}, "silent for 0.5 s (stopped)"),
        (1.09, {"stopped_s": 0.1, "last_instruction_s": 1000.6}, ""),  # an instruction is a sign, too
        (1.11, {"stopped_s": 0.1, "last_instruction_s": 1000.6}, "silent for 0.5 s (stopped)"),
        (1.99, {}, ""),  # runnable: starved
        (2.01, {}, "silent for 2.0 s"),
        (4.99, {"stopped_s": 0.49, "mode": Mode.SUSPENDED}, ""),  # an evaluation that was silent, stopped for a moment
        (5.01, {"stopped_s": 0.51, "mode": Mode.SUSPENDED}, "silent for 5.0 s (stopped)"),
        (19.99, {"mode": Mode.SUSPENDED}, ""),
        (20.01, {"mode": Mode.SUSPENDED}, "silent for 20.0 s"),
        (20.01, {"stopped_s": 0.1, "mode": Mode.SUSPENDED}, "silent for 20.0 s"),
        (9999.0, {"stopped_s": 9999.0, "mode": Mode.STARTING}, ""),
        (9999.0, {"stopped_s": 0.4, "since_s": 10998.6}, ""),  # the guardian itself had been away until then
        (59.0, {"last_beat_s": 1059.0}, ""),
        (61.0, {"last_beat_s": 1061.0}, "stuck for 61 s at instruction 7"),
        (9999.0, {"last_beat_s": 10999.0, "waiting": True}, ""),
        (599.0, {"last_beat_s": 1599.0, "mode": Mode.SUSPENDED}, ""),
        (601.0, {"last_beat_s": 1601.0, "mode": Mode.SUSPENDED}, "stuck for 601 s at instruction 7"),
        (61.0, {"last_beat_s": 1061.0, "last_instruction_s": 1060.9}, ""),
    ],
)
def test_who_is_given_up(after_s, facts, why):
    assert check(after_s, **facts) == why


@given(
    after_s=st.floats(0.0, 1e4),
    mode=st.sampled_from(Mode),
    waiting=st.booleans(),
    stopped_s=st.one_of(st.none(), st.floats(0.0, 1e4)),
    since_s=st.floats(0.0, 2e4),
)
def test_nobody_is_given_up_before_its_time(after_s, mode, waiting, stopped_s, since_s):
    if check(after_s, mode=mode, waiting=waiting, stopped_s=stopped_s, since_s=since_s):
        limit_s, is_suspended = PATIENCE.heartbeat_timeout_s, mode is Mode.SUSPENDED
        silent_s = min(after_s, 1000.0 + after_s - since_s)
        is_silent = silent_s > 4 * limit_s * (10 if is_suspended else 1)
        is_long_stopped = stopped_s is not None and (stopped_s if is_suspended else silent_s) > limit_s
        assert mode is not Mode.STARTING and (is_silent or is_long_stopped)


class Ward:
    """One child, with pid 1 at first, whose pulse and whose guardian's clock the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.pid = 1
        self.slot = HeartbeatPage(1).slot(0)
        self.monitor = HeartbeatMonitor({1: self.slot}, clock=lambda: self.now_s)
        self.slot[:] = memoryview(bytearray(64)).cast("d")
        self.slot[0] = self.slot[2] = self.now_s
        self.slot[3] = Mode.RUNNING

    def adopt(self, pid: int, mode: Mode) -> None:
        """Gives the pulse to a real process."""
        self.pid = pid
        self.slot[3] = mode
        self.monitor.add(pid, self.slot)

    def pass_time(self, seconds: float) -> dict[int, str]:
        """Looks in the usual rhythm; everything that was seen."""
        seen: dict[int, str] = {}
        for _ in range(round(seconds / CHECK_INTERVAL_S)):
            self.now_s += CHECK_INTERVAL_S
            seen |= self.monitor.check([self.pid])
        return seen


def test_no_worker_is_monitored_before_the_timeouts_are_known():
    ward = Ward()
    assert not ward.monitor.active and ward.pass_time(100.0) == {}
    ward.monitor.begin(PATIENCE)
    assert ward.monitor.active
    assert ward.pass_time(1.9) == {}  # what was before does not count
    assert ward.pass_time(0.2)[1].startswith("silent for 2.")


def test_coordinators_that_take_over_one_after_another_hide_no_silent_worker():
    ward = Ward()
    ward.monitor.begin(PATIENCE)
    seen: dict[int, str] = {}
    for _ in range(5):
        seen |= ward.pass_time(1.0)
        ward.monitor.begin(PATIENCE)  # as each coordinator begins
    assert list(seen) == [1]


def test_a_guardian_that_was_away_itself_begins_anew():
    ward = Ward()
    ward.monitor.begin(PATIENCE)
    assert ward.pass_time(1.9) == {}
    ward.now_s += 30.0  # no process ran
    assert ward.monitor.check([1]) == {} and ward.pass_time(1.9) == {}
    assert list(ward.pass_time(0.3)) == [1]


class InterruptedSlot:
    """A slot whose reader is interrupted after so many reads, while its worker goes on."""

    def __init__(self, slot, *, after_reads, go_on):
        self._slot, self._reads_left, self._go_on = slot, after_reads, go_on

    def __getitem__(self, field):
        if self._reads_left == 0:
            self._go_on()
        self._reads_left -= 1
        return self._slot[field]


@pytest.mark.parametrize("after_reads", range(6))
@pytest.mark.parametrize("excuse", ["wait", "long work"])
def test_a_worker_that_goes_on_while_its_slot_is_read_is_not_stuck(excuse, after_reads, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(heartbeat_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    slot = HeartbeatPage(1).slot(0)
    heartbeat = Heartbeat(slot)
    heartbeat.mode = Mode.RUNNING if excuse == "wait" else Mode.SUSPENDED
    if excuse == "wait":
        heartbeat.on_wait(Wait("", (1,)))

    def go_on():
        if excuse == "wait":
            heartbeat.on_wait(None)
        else:
            heartbeat.mode = Mode.RUNNING

    now_s += 2 * PATIENCE.watchdog_timeout_s
    seen = read_heartbeat(InterruptedSlot(slot, after_reads=after_reads, go_on=go_on))
    seen = replace(seen, last_beat_s=now_s)  # its heartbeats came all the time
    assert diagnose(seen, PATIENCE, now_s=now_s, since_s=0.0, stopped_s=None) == ""


def test_a_heartbeat_is_read_by_another_process():
    page = HeartbeatPage(3)
    if (pid := os.fork()) == 0:
        heartbeat = Heartbeat(page.slot(1))
        heartbeat.start()
        heartbeat.mode = Mode.RUNNING
        heartbeat.step = 12
        for _ in range(100):
            heartbeat.tick()
        heartbeat.on_wait(Wait("", (1,)))
        heartbeat.on_wait(Wait("", (2,)))
        heartbeat.on_wait(None)
        time.sleep(60)
        os._exit(0)
    try:
        deadline = time.monotonic() + 300
        while (seen := read_heartbeat(page.slot(1))).num_instructions < 104:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(3 * HEARTBEAT_INTERVAL_S)
        later = read_heartbeat(page.slot(1))
        assert later.mode is Mode.RUNNING and later.waiting and later.step == 12
        assert (
            later.last_beat_s > seen.last_beat_s and later.last_instruction_s == seen.last_instruction_s
        )  # it beats but does not get on
        assert read_heartbeat(page.slot(0)).last_activity_s == read_heartbeat(page.slot(2)).last_activity_s == 0.0
        monitor = HeartbeatMonitor({pid: page.slot(1), -1: page.slot(2)})
        assert (monitor.step(pid), monitor.step(-1)) == (12, None)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_the_kernel_says_who_is_stopped():
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        assert not is_stopped(sleeper.pid)
        sleeper.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 300
        while not is_stopped(sleeper.pid):
            assert time.monotonic() < deadline
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not is_stopped(sleeper.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize(
    ("passes_s", "num_checks", "expected"),
    [
        (0.25, 14, "stopped for 4 s"),
        (0.7, 5, "stopped for 4 s"),  # a turn that was cut short by something else
        (60.0, 4, "stopped for 4 s"),  # a guardian that is stopped itself, too
    ],
)
def test_a_worker_that_is_stopped_before_it_trains_is_killed(passes_s, num_checks, expected):
    sleeper = subprocess.Popen(["sleep", "60"])
    monitor = HeartbeatMonitor({sleeper.pid: HeartbeatPage(1).slot(0)}, stopped_s=3.0, clock=lambda: next(clock))
    clock = itertools.count(1000.0, passes_s)
    try:
        assert [monitor.check([sleeper.pid]) for _ in range(11)] == [{}] * 11
        sleeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
        seen = [list(monitor.check([sleeper.pid]).values()) for _ in range(num_checks)]
        assert seen == [*[[]] * (num_checks - 1), [expected]]
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("mode", [Mode.RUNNING, Mode.SUSPENDED])
def test_a_worker_that_is_stopped_is_killed_after_the_same_time_in_every_mode(mode):
    ward, sleeper = Ward(), subprocess.Popen(["sleep", "60"])
    ward.adopt(sleeper.pid, mode)
    try:
        ward.monitor.begin(PATIENCE)
        assert ward.pass_time(1.9) == {}  # silent, but not stopped
        sleeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
        if mode is Mode.SUSPENDED:
            assert ward.pass_time(0.5) == {}
        assert ward.pass_time(0.1)[sleeper.pid].endswith("(stopped)")
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_moments_of_a_stop_are_not_added_up():
    ward, sleeper = Ward(), subprocess.Popen(["sleep", "60"])
    ward.adopt(sleeper.pid, Mode.SUSPENDED)
    try:
        ward.monitor.begin(PATIENCE)
        for _ in range(5):
            sleeper.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
            assert ward.pass_time(0.4) == {}
            sleeper.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED)
            assert ward.pass_time(0.1) == {}
        sleeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
        for mode in (Mode.SUSPENDED, Mode.RUNNING, Mode.SUSPENDED):
            ward.slot[0], ward.slot[3] = ward.now_s, mode  # it has beaten in between
            assert ward.pass_time(0.3) == {}
    finally:
        sleeper.kill()
        sleeper.wait()
