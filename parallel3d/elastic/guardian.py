"""The guardian: the parent process of workers, which outlives them.

It notices a death within milliseconds (SIGCHLD, waitpid) and reports it as evidence, passes a person's stop on, kills
what does not leave in time, and stays until the coordinator says how the run has ended: that exit code is its own, so
that a launcher above it never takes a lost worker for success. It does not import torch.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

from parallel3d.elastic.control import CHUNK_BYTES, Address, FrameReader, encode_frame, open_connection
from parallel3d.elastic.coordinator import Limits
from parallel3d.elastic.finder import Finder
from parallel3d.elastic.verdict import EXIT_BY_SIGNAL, signal_name
from parallel3d.errors import EXIT_WORKER_LOST, LaunchError, ProtocolError

TICK_S = 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Collects SIGINT, SIGTERM and SIGCHLD while it is entered, and wakes a selector through `wakeup`."""

    def __init__(self) -> None:
        self.stops: list[int] = []
        """The stop signals that have come, oldest first."""
        self.wakeup, self._writer = socket.socketpair()
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Signals:
        for end in (self.wakeup, self._writer):
            end.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self.wakeup.close()
        self._writer.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in STOP_SIGNALS:
            self.stops.append(number)


class Guardian:
    """Watches over `children` (pid -> rank), which are this process's own."""

    def __init__(self, children: Mapping[int, int], *, finder: Finder, signals: Signals, limits: Limits):
        self._children = dict(children)
        self._ranks = sorted(children.values())
        self._limits = limits
        self._signals = signals
        self._stops_seen = 0
        self._deadline = float("inf")
        self._enforced: set[int] = set()
        self._link: socket.socket | None = None
        self._reader = FrameReader()
        self._exit_code: int | None = None
        """The run's, once the coordinator has said it (or is gone)."""
        self._untold: list[dict[str, Any]] = []
        """Ends that came before the coordinator was found."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.wakeup, selectors.EVENT_READ, self._drain_wakeup)
        self._finder = finder
        self._seeking = finder.own_address is None
        if finder.own_address:
            self._connect(finder.own_address)
        else:
            self._selector.register(finder.pipe, selectors.EVENT_READ, self._learn_address)

    def watch(self, *, parent: int | None) -> int:
        """The run's exit code, once it is over. Ends everything when its own `parent` (None: any) is gone."""
        try:
            while self._children or self._seeking or self._exit_code is None:
                self._reap()
                self._heed_stops()
                self._enforce_deadline()
                if parent is not None and os.getppid() != parent:
                    self._kill_all(enforced=False)
                for key, _ in self._selector.select(TICK_S):
                    key.data()
            return self._exit_code
        finally:
            self._kill_all(enforced=False)
            if self._link is not None:
                self._link.close()

    # Sources of news

    def _drain_wakeup(self) -> None:
        self._signals.wakeup.recv(CHUNK_BYTES)  # bounded: does not block, the selector says that there is news

    def _learn_address(self) -> None:
        address = self._finder.read_answer()
        self._selector.unregister(self._finder.pipe)
        self._seeking = False
        if address:
            self._connect(address)

    def _connect(self, address: Address) -> None:
        try:
            hello = {"op": "hello", "role": "guardian", "ranks": self._ranks}
            self._link = open_connection(address, hello, timeout_s=self._limits.connect_s)
        except LaunchError as error:
            self._lose_coordinator(str(error))
            return
        self._selector.register(self._link, selectors.EVENT_READ, self._hear)
        for end in self._untold:
            self._tell(end)

    def _hear(self) -> None:
        assert self._link is not None
        try:
            data = self._link.recv(CHUNK_BYTES)  # bounded: the selector says that there is news
            for header, _ in self._reader.feed(data):
                self._heed(header)
        except (OSError, ProtocolError):
            data = b""
        if not data:
            self._selector.unregister(self._link)
            self._link.close()
            self._link = None
            if self._exit_code is None:
                self._lose_coordinator("the run's coordinator is gone")

    def _heed(self, header: dict[str, Any]) -> None:
        match header["op"]:
            case "stop":
                self._allow(self._limits.stop_grace_s)
            case "abort":
                self._allow(header["grace_s"])
            case "over":
                self._exit_code = header["exit_code"]

    def _lose_coordinator(self, message: str) -> None:
        self._say(message)
        self._exit_code = EXIT_WORKER_LOST
        self._allow(self._limits.abort_grace_s)

    # Duties

    def _reap(self) -> None:
        for pid, rank in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[pid]
                exit_code = os.waitstatus_to_exitcode(status)
                end = {"op": "ended", "rank": rank, "exit_code": exit_code, "by_guardian": pid in self._enforced}
                if self._link is None:
                    self._untold.append(end)
                self._tell(end)
        if not self._children and not self._seeking and self._link is None and self._exit_code is None:
            self._end_alone()

    def _end_alone(self) -> None:
        """All its workers have ended before the coordinator was found; each has said why, unless it was killed."""
        codes = [end["exit_code"] for end in self._untold]
        self._exit_code = next((code for code in codes if code > 0), EXIT_WORKER_LOST)
        if min(codes, default=0) < 0:
            self._say(f"killed by {signal_name(-min(codes))} before the coordinator was found")

    def _heed_stops(self) -> None:
        for number in self._signals.stops[self._stops_seen :]:
            self._stops_seen += 1
            at_once = self._stops_seen > 1
            if self._seeking:
                self._exit_code = EXIT_BY_SIGNAL + number
            if self._seeking or at_once:
                self._kill_all(enforced=True)
            self._tell({"op": "stop", "signal": number, "at_once": at_once})

    def _allow(self, grace_s: float) -> None:
        """Workers have `grace_s` from now to leave, or less where that was said before."""
        self._deadline = min(self._deadline, time.monotonic() + grace_s)

    def _enforce_deadline(self) -> None:
        if time.monotonic() >= self._deadline:
            self._kill_all(enforced=True)

    def _kill_all(self, *, enforced: bool) -> None:
        """SIGKILL for every child. `enforced`: the run is ending anyway, so this is not evidence of a failure."""
        for pid in self._children:
            if enforced:
                self._enforced.add(pid)
            os.kill(pid, signal.SIGKILL)

    def _tell(self, header: dict[str, Any]) -> None:
        if self._link is not None:
            try:
                self._link.sendall(encode_frame(header))
            except OSError:
                return  # the coordinator is gone: the next read says so

    def _say(self, text: str) -> None:
        """A line on this process's own terminal, for what the coordinator can't tell."""
        ranks = ", ".join(str(rank) for rank in self._ranks)
        print(f"guardian of rank {ranks}: {text}", file=sys.stderr, flush=True)
