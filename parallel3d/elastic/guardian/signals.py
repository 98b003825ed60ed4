"""The signals that a stub, a coordinator or a guardian handles, collected for its loop."""

from __future__ import annotations

import select
import signal
import socket
import time
from types import FrameType, TracebackType
from typing import Any

from parallel3d.child_process import STOP_SIGNALS

STACK_DUMP_SIGNAL = signal.SIGUSR1
"""A worker writes its stacks to its log."""
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""A guardian takes one of them for a request for a hang report, the other for nothing or a notice (host_notice.py)."""
READ_BYTES = 2**16


class Signals:
    """Collects SIGINT, SIGTERM, SIGUSR1, SIGUSR2 and SIGCHLD while entered, and wakes a selector through `wakeup`.

    User signals that would kill the process are ignored afterwards: the exit code of the run must stand.
    """

    def __init__(self) -> None:
        self.stops: list[int] = []
        """The stop signals received, oldest first."""
        self.requests: list[int] = []
        """The user signals received, oldest first."""
        self.wakeup, self._writer = socket.socketpair()
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Signals:
        for end in (self.wakeup, self._writer):
            end.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, *USER_SIGNALS, signal.SIGCHLD):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            would_kill = number in USER_SIGNALS and handler == signal.SIG_DFL  # a notice that comes at the very end
            signal.signal(number, signal.SIG_IGN if would_kill else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self.wakeup.close()
        self._writer.close()

    def wait(self, seconds: float) -> bool:
        """Waits until the time is over or a stop signal arrives; returns True if one has."""
        deadline = time.monotonic() + seconds
        while not self.stops and (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([self.wakeup], [], [], left)
            if readable:
                self.drain()
        return bool(self.stops)

    def drain(self) -> None:
        """Empties the wakeup socket once it is readable."""
        self.wakeup.recv(READ_BYTES)  # bounded: does not block

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.add(number)

    def add(self, number: int) -> None:
        """Records a signal, this process's own or one that its parent passes on."""
        if number in STOP_SIGNALS:
            self.stops.append(number)
        elif number in USER_SIGNALS:
            self.requests.append(number)
