"""Clocks of an instruction list: how long it runs, and for how much of that it computes.

A CPU computes while the host's clock runs. A device is given orders, and the host goes on before they are done, so its
own events are recorded around each compute, in the stream that computes::

    stream   | wait for input 5 | start  forward 5  end | wait for gradient 2 | start  backward 2  end |

They are read after the step's one wait for the device, so nothing waits for them, and are used again in the next list.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import fmean
from typing import NamedTuple

from parallel3d.accelerator import Accelerator, TimedEvent
from parallel3d.pipeline.instructions import Op

ComputeHook = Callable[[float], float]
"""Called at the end of each compute with its seconds; returns the seconds that count. A slow rank sleeps in it."""

Slowness = Callable[[], float]
"""Returns how many times as long computes are to take: more than 1 on a rank that is made slow."""


class ListTimes(NamedTuple):
    """Seconds of one list, all by the same clock; 0 where they are unknown."""

    busy_s: float = 0.0
    """Spent computing."""
    run_s: float = 0.0
    """From the list's first instruction to its last."""


class ComputeClock(ABC):
    """Measures one list at a time."""

    is_of_device: bool
    """Whether the seconds are a device's own: its waits within a compute are not known apart from its work."""

    @abstractmethod
    def begin(self) -> None:
        """Begins a list; whatever was measured before is forgotten."""

    @abstractmethod
    def compute(self, op: Op) -> AbstractContextManager[None]:
        """A context that is one of the list's computes."""

    @abstractmethod
    def end(self) -> None:
        """Ends the list; a device may still be at it."""

    @abstractmethod
    def read(self) -> ListTimes:
        """The times of the list that has ended, after the host has waited for the device; does not wait itself."""


class HostClock(ComputeClock):
    """The host's clock, for computes on the CPU."""

    is_of_device = False

    def __init__(self, compute_hook: ComputeHook = lambda seconds: seconds):
        self._hook = compute_hook
        self.begin()

    def begin(self) -> None:
        self._busy_s = self._run_s = 0.0
        self._started_s = time.perf_counter()

    @contextmanager
    def compute(self, op: Op) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self._busy_s += self._hook(time.perf_counter() - started_s)

    def end(self) -> None:
        self._run_s = time.perf_counter() - self._started_s

    def read(self) -> ListTimes:
        return ListTimes(self._busy_s, self._run_s)


class _Compute(NamedTuple):
    """The events of a compute: it starts, it has computed, and it ends once it has taken as long as it is to take."""

    op: Op
    start: TimedEvent
    computed: TimedEvent
    end: TimedEvent


class DeviceClock(ComputeClock):
    """A device's own clock: events in the stream that computes.

    Where `slowness` is above 1, the device spins after each compute, for a multiple of the mean of such computes in the
    list before: how long this one takes is not known yet when the order is given.
    """

    is_of_device = True

    def __init__(self, accelerator: Accelerator, slowness: Slowness = lambda: 1.0):
        self._accelerator = accelerator
        self._slowness = slowness
        self._events: list[TimedEvent] = []
        """Of all lists; the first ones are those of the current list."""
        self._mean_s: dict[Op, float] = {}
        """Seconds of a compute, spinning left out, in the last list that was read."""
        self._num_recorded = 0
        self._computes: list[_Compute] = []

    def begin(self) -> None:
        self._num_recorded = 0
        self._computes = []
        self._record()

    @contextmanager
    def compute(self, op: Op) -> Iterator[None]:
        start = self._record()
        yield
        computed = end = self._record()
        if (factor := self._slowness()) > 1.0 and op in self._mean_s:
            self._accelerator.spin((factor - 1.0) * self._mean_s[op])
            end = self._record()
        self._computes.append(_Compute(op, start, computed, end))

    def end(self) -> None:
        self._record()

    def read(self) -> ListTimes:
        if not self._num_recorded or not (last := self._events[self._num_recorded - 1]).query():
            return ListTimes()
        own_s = defaultdict[Op, list[float]](list)
        for compute in self._computes:
            own_s[compute.op].append(_seconds(compute.start, compute.computed))
        self._mean_s = {op: fmean(seconds) for op, seconds in own_s.items()}
        busy_s = sum(_seconds(compute.start, compute.end) for compute in self._computes)
        return ListTimes(busy_s, _seconds(self._events[0], last))

    def _record(self) -> TimedEvent:
        if self._num_recorded == len(self._events):
            self._events.append(self._accelerator.timed_event())
        event = self._events[self._num_recorded]
        event.record(self._accelerator.current_stream())
        self._num_recorded += 1
        return event


def _seconds(start: TimedEvent, end: TimedEvent) -> float:
    return start.elapsed_time(end) / 1000
