"""The stub's children: forked, bound to its life, each with a link of messages and a beat.

stub (the launcher's or rank's own process)
  |- coordinator    on rank 0's host, and wherever one takes over
  |- guardian
       |- workers

A child can't outlive its parent (PR_SET_PDEATHSIG), and has a name that `ps -o comm` shows (PR_SET_NAME). Its beat is
a number in shared memory, which it changes in every turn of its loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias

from parallel3d.child_process import STOP_SIGNALS
from parallel3d.elastic.frames import CHUNK_BYTES, FrameReader, encode_frame
from parallel3d.elastic.guardian.heartbeat import is_stopped
from parallel3d.elastic.outbox import Outbox

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
SEND_S = 5.0
"""Longest wait of the stub for a child to read: messages are few, so it has been stopped for long."""
KILL_S = 10.0
"""Longest wait for the end of a process that was killed: none ends while a dead file system keeps it in a call."""
KILL_CHECK_S = 0.002

BeatSlot: TypeAlias = "memoryview[float]"
NO_BEAT = 0.0


class ParentLink:
    """A child's end of its link with the stub."""

    def __init__(self, connection: socket.socket, slot: BeatSlot):
        connection.setblocking(False)
        self.connection = connection
        self._slot = slot
        self._reader = FrameReader()
        self._waiting: dict[str, bytes] = {}
        """Messages that the stub has not taken yet, by op, in order."""
        self._outbox = Outbox()
        """The one of which it may have taken a part."""

    def send(self, header: dict[str, Any]) -> None:
        """Sends a message without waiting. What a stub that is stopped does not take follows with later beats: of each
        op the newest, since a stub acts on that alone."""
        self._waiting.pop(header["op"], None)
        self._waiting[header["op"]] = encode_frame(header)
        self._flush()

    def drain(self) -> None:
        """Waits until the stub has taken all: there is nothing left to do here. Without the stub this process ends."""
        while self._flush():
            select.select([], [self.connection], [])  # bounded: this process dies with the stub

    def _flush(self) -> bool:
        """Sends what the stub takes now; returns whether something is left."""
        try:
            while self._outbox or self._waiting:
                if not self._outbox:
                    self._outbox.add(self._waiting.pop(next(iter(self._waiting))))
                self._outbox.send(self.connection)
                if self._outbox:
                    return True
        except OSError:  # the stub is gone
            self._waiting.clear()
            self._outbox = Outbox()
        return False

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived, once the connection is readable."""
        try:
            data = self.connection.recv(CHUNK_BYTES)  # bounded: does not block
        except OSError:
            return []
        return [header for header, _ in self._reader.feed(data)]

    def beat(self) -> None:
        """Shows the stub that this process runs; from now on silence is evidence that it does not."""
        self._slot[0] = time.monotonic()
        self._flush()

    def pause(self) -> None:
        """Announces long work without beats."""
        self._slot[0] = NO_BEAT


class ChildProcess:
    """The stub's end: a child that runs `main`, which returns its exit code."""

    def __init__(self, name: str, main: Callable[[ParentLink], int]):
        self._slot: BeatSlot = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(SEND_S)
        self._reader = FrameReader()
        self._last_beat = NO_BEAT
        self.silent_turns = 0
        """Checks in a row that have found it stopped, or without a new beat."""

        def run() -> int:
            self.connection.close()
            return main(ParentLink(theirs, self._slot))

        self.pid = fork_bound(name, run)
        theirs.close()

    def send(self, header: dict[str, Any]) -> None:
        """Sends a message; a child that is gone or does not read it is not waited for."""
        with contextlib.suppress(OSError):
            self.connection.sendall(encode_frame(header))

    def receive(self) -> list[dict[str, Any]] | None:
        """Returns the messages that have arrived; None once the child has closed its end."""
        try:
            data = self.connection.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)  # bounded: does not block
        except BlockingIOError:
            return []
        except OSError:
            return None
        return [header for header, _ in self._reader.feed(data)] if data else None

    def check_beat(self) -> None:
        """Counts turns of silence; call it once a turn."""
        beat = self._slot[0]
        silent = is_stopped(self.pid) or (beat != NO_BEAT and beat == self._last_beat)
        self.silent_turns = self.silent_turns + 1 if silent else 0
        self._last_beat = beat

    def exit_code(self) -> int | None:
        """Returns its exit code, minus the number for a death by signal; None while it runs."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None

    def signal(self, number: int) -> None:
        """Sends a signal; not after `exit_code` has returned a code."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it and waits for that: it has written its last byte. Not after `exit_code` has returned a code."""
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        while self.exit_code() is None and time.monotonic() < deadline:
            time.sleep(KILL_CHECK_S)


def fork_bound(name: str, main: Callable[[], int]) -> int:
    """Forks a child that ends with this process and runs `main`; returns its pid.

    Stop signals stay blocked in it until it has its handlers and unblocks them.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            exit_code = 1
            try:
                _bind_to_parent(parent, name)
                exit_code = main()
            except Exception:
                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
                os._exit(exit_code)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _bind_to_parent(parent: int, name: str) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_NAME, f"p3d-{name}".encode())
    if os.getppid() != parent:  # died between the fork and here
        os._exit(1)
    signal.set_wakeup_fd(-1)
