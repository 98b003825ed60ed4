"""The abort token, which ends all blocking waits of a membership generation.

Every wait in this project takes a token and either polls it (`check`, at most every `POLL_S`) or registers a callback
that wakes it (`on_abort`). Aborting is idempotent; the first reason stays.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from parallel3d.errors import GenerationEnded

POLL_S = 0.05
ABORT_GRACE_S = 0.25
"""How long a broken connection waits for the abort that explains it."""


class Wait(NamedTuple):
    """A wait for peers: the group whose collective it is ("" for a message), and the ranks that may be late."""

    what: str
    ranks: tuple[int, ...]


class AbortToken:
    """A one-way switch: after `abort(reason)` every wait that uses it raises GenerationEnded(reason)."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self.reason = ""
        self.on_wait: Callable[[Wait | None], None] = lambda wait: None
        """Called when a wait for peers begins and (None) ends: a rank that waits for others is not stuck itself."""
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        """Seconds of all waits, by group."""

    @property
    def aborted(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raises GenerationEnded once the token is aborted."""
        if self._event.is_set():
            raise GenerationEnded(self.reason)

    def abort(self, reason: str) -> None:
        """Ends the generation and runs the callbacks, each once, on the calling thread."""
        with self._lock:
            if self._event.is_set():
                return
            self.reason = reason
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def on_abort(self, callback: Callable[[], None]) -> None:
        """Runs `callback` at abort, or now if the token is already aborted."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def remove_callback(self, callback: Callable[[], None]) -> None:
        """Removes a callback, so that the token does not keep a closed socket alive."""
        with self._lock:
            self._callbacks = [kept for kept in self._callbacks if kept != callback]

    @contextmanager
    def waiting(self, what: str = "", ranks: Sequence[int] = ()) -> Iterator[None]:
        """Marks the block as a wait for some of these ranks; `what` is the group of a collective."""
        self.on_wait(Wait(what, tuple(ranks)))
        started = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s[what] += time.perf_counter() - started
            self.on_wait(None)

    def sleep(self, seconds: float) -> None:
        """Sleeps, but wakes and raises GenerationEnded as soon as the token is aborted."""
        if self._event.wait(seconds):
            self.check()
