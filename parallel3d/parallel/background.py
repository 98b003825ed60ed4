"""Work on a thread of its own, for what may block longer than anybody wants to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from parallel3d.errors import GenerationEnded
from parallel3d.parallel.abort import AbortToken

ABORT_GRACE_S = 0.25  # for the coordinator's word on why a connection broke
T = TypeVar("T")


def run_in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Starts `work`; its result, or what it raised, comes with the future. A process may end before the thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - carried to whoever asks
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future


def build_in_background(build: Callable[[], T], name: str, token: AbortToken, timeout_s: float) -> T:
    """What `build` gives, a group that connects with its peers, or GenerationEnded. It is left to itself when the
    generation ends: a peer that died while a library waits for its connection is noticed by that library's own timeout
    alone."""
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


def release_in_background(only: list[Any], name: str) -> None:
    """Lets go of what takes long to end. The list holds the only reference: one in the caller's frame might be the
    last, and then it would end on the caller's thread."""
    threading.Thread(target=only.clear, daemon=True, name=name).start()
