"""Work on a thread of its own, for what may block longer than anybody wants to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_aside(work: Callable[[], T], name: str) -> Future[T]:
    """Starts `work`; its result, or what it raised, comes with the future. A process may end before the thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - carried to whoever asks
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
