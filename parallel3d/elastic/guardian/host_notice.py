"""A guardian's lookout for the notice that its host will be taken away: by a signal, or in a process that asks.

A process rather than a thread, since the guardian forks workers, and never waits for a file system or a server. Of
several guardians of a host the first asks: what it finds is the whole host's (coordinator/drain_manager.py).
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import time
from collections.abc import Callable
from typing import Any

from parallel3d.config.schema import NoticeConfig
from parallel3d.elastic.child_processes import fork_bound
from parallel3d.elastic.frames import CHUNK_BYTES

SIGNAL_SECONDS = 30.0
"""From a signal to the end of the host, unless elastic.notice.deadline_s says."""


class HostNotice:
    """Calls `on_notice` once, with the notice's frame for the coordinator; `on_trouble` with what can't be asked."""

    def __init__(
        self,
        config: NoticeConfig,
        *,
        selector: selectors.BaseSelector,
        on_notice: Callable[[], None],
        on_trouble: Callable[[str], None],
    ):
        self._config = config
        self._asks = any(each is not None for each in (config.file, config.command, config.cloud))
        self._selector = selector
        self._on_notice = on_notice
        self._on_trouble = on_trouble
        self._signal = signal.Signals[f"SIG{config.signal}"] if config.signal else None
        self.status_signal = signal.SIGUSR2 if self._signal == signal.SIGUSR1 else signal.SIGUSR1
        """The signal that asks for the status of all workers."""
        self._text = ""
        self._deadline_s = 0.0
        self._pid = self._reader = -1
        self._received = b""
        self._start_s = 0.0
        """When the process that asks is to be started."""

    def turn(self) -> None:
        """Starts the process that asks, first or again: it may have been killed."""
        if self._asks and self._pid < 0 and not self._text and time.monotonic() >= self._start_s:
            self._start()

    def on_signal(self, number: int) -> None:
        """Handles a signal to this guardian's launcher's process."""
        if number == self._signal:
            self._take(signal.Signals(number).name, self._config.deadline_s or SIGNAL_SECONDS)

    def frame(self) -> dict[str, Any] | None:
        """Returns what a coordinator must know, with the seconds that are left; None without a notice."""
        if not self._text:
            return None
        left_s = max(0, round(self._deadline_s - time.monotonic()))
        return {"op": "announce_preemption", "text": self._text, "seconds": left_s}

    def close(self) -> None:
        """Ends the process that asks."""
        if self._pid >= 0:
            self._selector.unregister(self._reader)
            os.close(self._reader)
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)  # bounded: SIGKILL ends a process
            self._pid = -1

    def _take(self, text: str, seconds: float) -> None:
        if not self._text:
            self._text, self._deadline_s = text, time.monotonic() + seconds
            self._on_notice()

    def _start(self) -> None:
        self._reader, writer = os.pipe()
        self._pid = fork_bound("notices", lambda: _ask_until_noticed(self._config, writer))
        os.close(writer)
        self._received = b""
        self._selector.register(self._reader, selectors.EVENT_READ, self._receive)

    def _receive(self) -> None:
        data = os.read(self._reader, CHUNK_BYTES)  # there is some, or the end
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "seconds" in message:
                self._take(message["text"], message["seconds"])
            else:
                self._on_trouble(message["text"])
        if not data:
            self.close()
            self._start_s = time.monotonic() + self._config.every_s


def _ask_until_noticed(config: NoticeConfig, writer: int) -> int:
    """Asks all sources again and again, and writes what they say; each one's trouble once."""
    from parallel3d.elastic.guardian.notice_sources import build_sources  # HTTP is for this process alone

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(3, writer)  # a connection that the guardian closes must not stay open in here
    os.closerange(writer + 1, limit)
    troubled: set[str] = set()
    while True:  # bounded: this process dies with its guardian
        for name, ask in build_sources(config).items():
            try:
                notice = ask()
            except (OSError, ValueError, KeyError, TypeError) as error:
                if name not in troubled:
                    troubled.add(name)
                    text = f"{name} can't be asked ({error}); it is tried again every {config.every_s:g} s"
                    _write(writer, {"text": f"elastic.notice: {text}"})
                continue
            if notice is not None:
                _write(writer, {"text": notice.text, "seconds": notice.seconds})
                return 0
        time.sleep(config.every_s)


def _write(writer: int, message: dict[str, Any]) -> None:
    os.write(writer, json.dumps(message).encode() + b"\n")
