"""Background threads: for saves, and for library calls that may block longer than a generation lives."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from parallel3d.errors import GenerationEnded
from parallel3d.parallel.abort import ABORT_GRACE_S, AbortToken

T = TypeVar("T")


class BackgroundExecutor:
    """Runs work in order on a daemon thread, which lives while there is work. A process may exit before the work."""

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._work: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_running = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` after everything submitted before; the future has its result or exception."""
        future: Future[T] = Future()
        with self._lock:
            self._work.append((work, future))
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._work:
                    self._is_running = False
                    return
                work, future = self._work.popleft()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - passed on through the future
                future.set_exception(error)
            del work, future  # a snapshot is freed as soon as it is written


def run_in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Runs `work` on a thread of its own."""
    return BackgroundExecutor(name).submit(work)


def build_in_background(build: Callable[[], T], name: str, token: AbortToken, timeout_s: float) -> T:
    """Returns the result of `build`, which connects a group with its peers; raises GenerationEnded.

    The thread is abandoned when the generation ends: a library that waits for the connection of a dead peer returns
    only after its own timeout.
    """
    result = run_in_background(build, f"build-{name}")
    over = threading.Event()
    result.add_done_callback(lambda _: over.set())
    token.on_abort(over.set)
    try:
        if not over.wait(timeout_s):
            raise GenerationEnded(f"group {name}: could not be built in {timeout_s:.0f} s")
        token.check()
        return result.result(timeout=0)
    except RuntimeError as error:
        token.sleep(ABORT_GRACE_S)
        raise GenerationEnded(f"group {name}: {str(error).splitlines()[0]}") from None
    finally:
        token.remove_callback(over.set)


def release_in_background(only: list[Any], name: str, on_start: Callable[[], None] = lambda: None) -> None:
    """Drops a reference to an object that takes long to destroy; `on_start` runs on the thread before that.

    The list must hold the only reference: one in the caller's frame could be the last, which would destroy the object
    on the caller's thread.
    """

    def release() -> None:
        on_start()
        only.clear()

    threading.Thread(target=release, daemon=True, name=name).start()
