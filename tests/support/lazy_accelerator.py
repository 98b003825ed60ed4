"""A device made of CPU tensors whose copies happen as late as they may: when someone waits for them.

Computation on the CPU happens at once, so it stands for a device's computing stream. A copy is only written down; it is
done when the host waits for a later event, or the computing stream waits for one. Memory that waits for a copy
holds NaN (the largest integer), so what is read before its event is seen in the numbers.

Its clock is moved by the test, by spinning and, if `wait_s` is set, by each wait of the computing stream.
"""

import threading
from contextlib import contextmanager

import torch

from parallel3d.accelerator import Accelerator

COMPUTE, TO_HOST, TO_DEVICE = "compute", "to_host", "to_device"


class LazyAccelerator(Accelerator):
    """`log` names, in order, each copy with its stream, and each wait of a stream or of the host."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.log = []
        self.users = []
        """The names of the threads that have set this device as theirs."""
        self.kept = []
        self.now_s, self.wait_s = 0.0, 0.0
        self.is_behind = False
        """Whether the device has not come to any timed event yet."""
        self.num_timed_events = 0
        self._streams = {name: LazyStream(self, name) for name in (COMPUTE, TO_HOST, TO_DEVICE)}
        self._current = COMPUTE

    def use(self):
        self.users.append(threading.current_thread().name)

    def synchronize(self):
        for stream in self._streams.values():
            stream.run(len(stream.work))

    def current_stream(self):
        return self._streams[self._current]

    def copy_stream(self, direction):
        return self._streams[direction]

    @contextmanager
    def on(self, stream):
        self._current, before = stream.name, self._current
        try:
            yield
        finally:
            self._current = before

    def keep_for(self, tensor, stream):
        self.kept.append((tensor.data_ptr(), stream.name))

    def pinned(self, tensor):
        return tensor.clone()

    def empty_pinned(self, shape, dtype):
        return poisoned(torch.empty(shape, dtype=dtype))

    def copy(self, target, source):
        poisoned(target)
        stream = self.current_stream()
        self.log.append(f"{stream.name} copies")
        stream.work.append(lambda: target.copy_(source))
        if stream.name == COMPUTE:
            stream.run(len(stream.work))

    def timed_event(self):
        self.num_timed_events += 1
        return LazyTimedEvent(self)

    def spin(self, seconds):
        self.now_s += seconds


class LazyStream:
    def __init__(self, accelerator, name):
        self.accelerator, self.name = accelerator, name
        self.work, self.num_done = [], 0

    def run(self, end):
        """Does the work in front of position `end` that is not done yet."""
        while self.num_done < end:
            task, self.work[self.num_done] = self.work[self.num_done], None
            self.num_done += 1
            task()

    def record_event(self):
        return LazyEvent(self, len(self.work))

    def wait_event(self, event):
        self.accelerator.log.append(f"{self.name} waits for {event.stream.name}")
        if self.name == COMPUTE:
            event.stream.run(event.end)
            self.accelerator.now_s += self.accelerator.wait_s
        else:
            self.work.append(lambda: event.stream.run(event.end))


class LazyEvent:
    def __init__(self, stream, end):
        self.stream, self.end = stream, end

    def synchronize(self):
        self.stream.accelerator.log.append(f"the host waits for {self.stream.name}")
        self.stream.run(self.end)


class LazyTimedEvent:
    def __init__(self, accelerator):
        self.accelerator, self.at_s = accelerator, None

    def record(self, stream):
        assert stream.name == COMPUTE
        self.at_s = self.accelerator.now_s

    def query(self):
        return not self.accelerator.is_behind

    def elapsed_time(self, end_event):
        assert self.query() and end_event.query(), "as CUDA: an error, and no wait"
        return 1000 * (end_event.at_s - self.at_s)


def poisoned(tensor):
    return tensor.detach().fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
