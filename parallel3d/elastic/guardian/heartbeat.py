"""Heartbeats: a shared page that workers write and their guardian reads, and the diagnosis of what it shows.

The page is an anonymous shared mapping made before the forks, one slot per child: no system call, no guardian thread,
nothing that a full network could delay. A thread of the worker writes the time of its last beat; the main thread counts
instructions and writes its current step, so that a death is reported with its step and no step needs a message. Three
cases:

    silent and stopped    no sign of life, and the kernel reports the process as stopped: killed after
                          `heartbeat_timeout_s`
    silent but runnable   no sign of life because the machine is busy: killed after four times as long
    stuck                 beats, but the main thread makes no progress without waiting for a peer: killed after
                          `watchdog_timeout_s`

Beats and instructions both count as signs of life. Beats cover long instructions and are rare: a thread that wakes
takes Python's lock from the main thread, and on a busy machine keeps it until it gets a core. 20 beats a second cost 1
to 2 % of a step.

Both timeouts follow the network's measured round trip. While a worker evaluates, saves, or runs its first steps, they
are ten times as long, except for one that the kernel reports as stopped: there the stop itself must last for
`heartbeat_timeout_s`, since such work may have been silent before. Before it starts to train, only a stopped worker is
killed.
"""

from __future__ import annotations

import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeAlias

from parallel3d.config.schema import TimeoutConfig
from parallel3d.parallel.abort import Wait

HEARTBEAT_INTERVAL_S = 0.25
CHECK_INTERVAL_S = 0.05
SLOT_BYTES = 64
STARVED_FACTOR = 4.0
SUSPENDED_FACTOR = 10.0
LATE_CHECKS = 3.0
MISSED_BEATS = 3.0
START_CHECK_S = 0.5
"""Between two checks of workers that have not started to train; a late one counts for two."""

HeartbeatSlot: TypeAlias = "memoryview[float]"

_FIELDS = SLOT_BYTES // 8  # doubles: they hold whole numbers up to 2**53, and eight aligned bytes are written at once
_BEAT, _COUNT, _MOVED, _MODE, _WAITING, _STEP = range(6)


class Mode(IntEnum):
    """A worker's mode, which scales its timeouts."""

    STARTING = 0
    """Not monitored."""
    RUNNING = 1
    SUSPENDED = 2
    """Long work that counts no instructions: timeouts are ten times as long, unless the kernel has stopped it."""


class HeartbeatPage:
    """The shared page, created before the forks. Slots are numbered in the order of the children."""

    def __init__(self, num_slots: int):
        self._slots = memoryview(mmap.mmap(-1, num_slots * SLOT_BYTES)).cast("d")

    def slot(self, number: int) -> HeartbeatSlot:
        return self._slots[number * _FIELDS : (number + 1) * _FIELDS]

    def clear(self, number: int) -> HeartbeatSlot:
        """Returns a slot for a new child: without the traces of the one that had it before."""
        slot = self.slot(number)
        slot[:] = memoryview(bytes(SLOT_BYTES)).cast("d")
        return slot


class Heartbeat:
    """Writes a worker's slot."""

    def __init__(self, slot: HeartbeatSlot):
        self._slot = slot
        self._num_waits = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the heartbeat thread."""
        self._slot[_BEAT] = self._slot[_MOVED] = time.monotonic()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def tick(self) -> None:
        """Counts an instruction; the main thread calls it for each."""
        slot = self._slot
        slot[_COUNT] += 1.0
        slot[_MOVED] = time.monotonic()

    @property
    def mode(self) -> Mode:
        return Mode(int(self._slot[_MODE]))

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self.tick()
        self._slot[_MODE] = mode

    @property
    def step(self) -> int | None:
        """The current step; None before the first."""
        return int(self._slot[_STEP]) or None

    @step.setter
    def step(self, step: int) -> None:
        self._slot[_STEP] = step

    def on_wait(self, wait: Wait | None) -> None:
        """Records that a thread begins or (None) ends a wait for peers: a waiting worker is not stuck."""
        self.tick()
        with self._lock:
            self._num_waits += -1 if wait is None else 1
            self._slot[_WAITING] = self._num_waits

    def _beat(self) -> None:
        while True:
            self._slot[_BEAT] = time.monotonic()
            time.sleep(HEARTBEAT_INTERVAL_S)


@dataclass(frozen=True, kw_only=True)
class HeartbeatState:
    """The contents of a slot."""

    last_beat_s: float
    """Time of the last beat, by the monotonic clock, which all processes of a host share."""
    last_instruction_s: float
    """Time of the last instruction."""
    num_instructions: int
    mode: Mode
    waiting: bool
    step: int | None
    """The current step; None before the first."""

    @property
    def last_activity_s(self) -> float:
        return max(self.last_beat_s, self.last_instruction_s)


def read_heartbeat(slot: HeartbeatSlot) -> HeartbeatState:
    """Returns what a slot holds, while its worker writes to it.

    A worker counts an instruction before it notes that a wait or long work is over. What excuses its silence is read
    first, so that a guardian that is interrupted in here never sees an excuse that is gone beside a time before that.
    """
    mode, waiting = Mode(int(slot[_MODE])), bool(slot[_WAITING])
    return HeartbeatState(
        last_beat_s=slot[_BEAT],
        last_instruction_s=slot[_MOVED],
        num_instructions=int(slot[_COUNT]),
        mode=mode,
        waiting=waiting,
        step=int(slot[_STEP]) or None,
    )


@dataclass(frozen=True, kw_only=True)
class HeartbeatTimeouts:
    """How long a worker may be silent, and how long stuck, in seconds."""

    heartbeat_timeout_s: float
    watchdog_timeout_s: float


def plan_heartbeat_timeouts(
    heartbeat_timeout: TimeoutConfig, watchdog_timeout: TimeoutConfig, round_trip_s: float
) -> HeartbeatTimeouts:
    """Returns multiples of the network's measured round trip, each clamped to its bounds."""

    def clamp(rule: TimeoutConfig) -> float:
        return min(max(rule.multiplier * round_trip_s, rule.min_s), rule.max_s)

    return HeartbeatTimeouts(heartbeat_timeout_s=clamp(heartbeat_timeout), watchdog_timeout_s=clamp(watchdog_timeout))


def diagnose(
    state: HeartbeatState, timeouts: HeartbeatTimeouts, *, now_s: float, since_s: float, stopped_s: float | None
) -> str:
    """Returns why a worker must be killed, or "".

    Times before `since_s` do not count. `stopped_s`: for how long the kernel has reported it as stopped; None if it
    does not.
    """
    if state.mode is Mode.STARTING:
        return ""
    is_suspended = state.mode is Mode.SUSPENDED
    factor = SUSPENDED_FACTOR if is_suspended else 1.0
    silent_s = now_s - max(state.last_activity_s, since_s)
    starved_s = max(STARVED_FACTOR * timeouts.heartbeat_timeout_s, MISSED_BEATS * HEARTBEAT_INTERVAL_S)
    if stopped_s is not None and (stopped_s if is_suspended else silent_s) > timeouts.heartbeat_timeout_s:
        return f"silent for {silent_s:.1f} s (stopped)"
    if silent_s > factor * starved_s:
        return f"silent for {silent_s:.1f} s"
    still_s = now_s - max(state.last_instruction_s, since_s)
    if not state.waiting and still_s > factor * timeouts.watchdog_timeout_s:
        return f"stuck for {still_s:.0f} s at instruction {state.num_instructions}"
    return ""


class HeartbeatMonitor:
    """Monitors the slots of a guardian's children (by pid) every `CHECK_INTERVAL_S`, once it has its timeouts.

    `stopped_s`: how long a child may be stopped before it trains.
    """

    def __init__(
        self,
        slots: Mapping[int, HeartbeatSlot],
        *,
        stopped_s: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._slots = dict(slots)
        self._stopped_s = stopped_s
        self._stopped_for_s = dict.fromkeys(slots, 0.0)
        """How long checks in a row have found a child stopped before it trains."""
        self._last_start_check_s = float("-inf")
        self._stopped_since_s: dict[int, float] = {}
        """The first of the checks in a row that have found a child in training stopped."""
        self._clock = clock
        self.timeouts: HeartbeatTimeouts | None = None
        self._since_s = self._last_check_s = 0.0

    @property
    def active(self) -> bool:
        return self.timeouts is not None

    def add(self, pid: int, slot: HeartbeatSlot) -> None:
        """Monitors one more child."""
        self._slots[pid], self._stopped_for_s[pid] = slot, 0.0
        self._stopped_since_s.pop(pid, None)

    def begin(self, timeouts: HeartbeatTimeouts) -> None:
        """Sets the timeouts, as every coordinator does. Only the first time forgets earlier silence: else coordinators
        that are lost one after another would keep a stopped worker from being found."""
        if self.timeouts is None:
            self._since_s = self._last_check_s = self._clock()
        self.timeouts = timeouts

    def check(self, pids: Iterable[int]) -> dict[int, str]:
        """Returns the children that must be killed, and why. After a late check, earlier silence does not count."""
        unresponsive = self._check_starting(pids)
        if self.timeouts is None:
            return unresponsive
        now_s = self._clock()
        if now_s - self._last_check_s > LATE_CHECKS * CHECK_INTERVAL_S:
            self._since_s = now_s
        self._last_check_s = now_s
        for pid in pids:
            state = read_heartbeat(self._slots[pid])
            is_silent = now_s - state.last_activity_s > self.timeouts.heartbeat_timeout_s
            stopped_s = self._stop_lasts_s(pid, now_s, is_asked=is_silent or state.mode is Mode.SUSPENDED)
            if why := diagnose(state, self.timeouts, now_s=now_s, since_s=self._since_s, stopped_s=stopped_s):
                unresponsive[pid] = why
        return unresponsive

    def _stop_lasts_s(self, pid: int, now_s: float, *, is_asked: bool) -> float | None:
        """Returns for how long checks in a row have found a child in training stopped; None if it is not, or the
        kernel is not asked."""
        if not (is_asked and is_stopped(pid)):
            self._stopped_since_s.pop(pid, None)
            return None
        return now_s - max(self._stopped_since_s.setdefault(pid, now_s), self._since_s)

    def _check_starting(self, pids: Iterable[int]) -> dict[int, str]:
        """Returns the children that have been stopped for too long before they train. A late check, of a
        guardian that was stopped itself, counts little."""
        now_s = self._clock()
        passed_s = now_s - self._last_start_check_s
        if passed_s < START_CHECK_S:
            return {}
        self._last_start_check_s = now_s
        stopped = {}
        for pid in pids:
            is_starting = read_heartbeat(self._slots[pid]).mode is Mode.STARTING
            before_s = self._stopped_for_s[pid]
            counted_s = before_s + min(passed_s, 2 * START_CHECK_S) if is_starting and is_stopped(pid) else 0.0
            self._stopped_for_s[pid] = counted_s
            if counted_s > self._stopped_s:
                stopped[pid] = f"stopped for {counted_s:.0f} s"
        return stopped

    def silent_s(self, pid: int) -> float | None:
        """Returns the seconds since a child's last sign of life; None if it has given none."""
        last_s = read_heartbeat(self._slots[pid]).last_activity_s
        return self._clock() - last_s if last_s else None

    def step(self, pid: int) -> int | None:
        """Returns a child's current or last step."""
        return read_heartbeat(self._slots[pid]).step


def is_stopped(pid: int) -> bool | None:
    """Returns whether the kernel has stopped a process (SIGSTOP, a debugger); None without /proc."""
    if sys.platform != "linux":
        return None
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"
