"""Waits among ranks that are threads: every blocking wait goes through one condition.

So a deadlock is detected the moment it happens: all live ranks wait, and nothing that they wait for is there. Then each
raises DeadlockError with a hang report, instead of hanging.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from parallel3d.elastic.hang_report import HangReportLine, format_hang_report
from parallel3d.parallel.abort import AbortToken

T = TypeVar("T")


class DeadlockError(AssertionError):
    """All live ranks wait for something that can't come; the message is a hang report."""


class RankDied(Exception):
    """An injected death, which ends the rank's thread."""


class ThreadScheduler:
    """The waits of `num_ranks` threads: their tokens, deadlock detection, injected deaths."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self.tolerates_deaths = False
        """True if a death (RankDied) does not fail the other ranks, because a coordinator handles it."""
        self.tokens = [AbortToken() for _ in range(num_ranks)]
        self._lock = threading.RLock()
        self._wake = [threading.Condition(self._lock) for _ in range(num_ranks)]
        self._alive = set(range(num_ranks))
        self._waiting: dict[int, tuple[Callable[[], bool], Callable[[], str], AbortToken]] = {}
        self._deadlock: str | None = None
        self._calls = [0] * num_ranks
        self._deaths: dict[int, int] = {}
        self._doing = ["" for _ in range(num_ranks)]
        for token in self.tokens:
            token.on_abort(self._notify_aborted)

    def begin_generation(self, rank: int, token: AbortToken) -> None:
        """Makes the rank wait with this generation's token from now on."""
        self.tokens[rank] = token
        token.on_abort(self._notify_aborted)

    def die_at(self, rank: int, call: int) -> None:
        """Makes `rank` die at its `call`-th communication call (1-based)."""
        self._deaths[rank] = call

    def doing(self, rank: int, what: str) -> None:
        """Records a rank's current instruction, for hang reports."""
        self._doing[rank] = what

    # --- for groups, links and coordinators ------------------------------------------------------------------------

    def count_call(self, rank: int) -> None:
        """Counts a communication call; raises the injected death."""
        self._calls[rank] += 1
        if self._calls[rank] == self._deaths.get(rank):
            raise RankDied(f"rank {rank} dies at its call {self._calls[rank]}")
        self.tokens[rank].check()

    def wait(
        self, rank: int, ready: Callable[[], bool], what: Callable[[], str], *, token: AbortToken | None = None
    ) -> None:
        """Blocks `rank` until `ready()`, its token is aborted, or all ranks are deadlocked.

        `what()` describes the wait for a hang report. `token` defaults to the rank's.
        """
        token = token or self.tokens[rank]
        with self._lock:
            self._waiting[rank] = (ready, what, token)
            try:
                self._detect_deadlock()
                while not ready() and not token.aborted and self._deadlock is None:
                    self._wake[rank].wait(timeout=60.0)
                if ready():
                    return
                token.check()
                raise DeadlockError(self._deadlock or f"rank {rank} waited 60 s: {what()}")
            finally:
                del self._waiting[rank]

    def run_locked(self, action: Callable[[], T]) -> T:
        """Runs `action` under the lock and wakes the ranks that wait for what it has changed."""
        with self._lock:
            result = action()
            self._notify_ready()
            return result

    def on_rank_end(self, rank: int, error: BaseException | None) -> None:
        """Handles the end of a rank's thread. Its failure aborts all tokens before the rank counts as gone."""
        if error is not None and not (self.tolerates_deaths and isinstance(error, RankDied)):
            for token in self.tokens:
                token.abort(f"rank {rank}: {error}")
        with self._lock:
            self._alive.discard(rank)
            self._detect_deadlock()
            self._notify_ready()

    def _detect_deadlock(self) -> None:
        if self._alive and self._alive <= set(self._waiting) and self._deadlock is None:
            waits = {rank: self._waiting[rank] for rank in sorted(self._alive)}
            if not any(ready() or token.aborted for ready, _, token in waits.values()):
                table = [
                    HangReportLine(rank=r, doing=self._doing[r], remark=f"waits {w()}")
                    for r, (_, w, _) in waits.items()
                ]
                self._deadlock = f"deadlock:\n{format_hang_report(table)}"
                self._notify_ready()

    def _notify_ready(self) -> None:
        """Wakes the ranks whose wait is over, and no other: each look would cost a switch of threads."""
        for rank, (ready, _, token) in self._waiting.items():
            if ready() or token.aborted or self._deadlock is not None:
                self._wake[rank].notify()

    def _notify_aborted(self) -> None:
        with self._lock:
            self._notify_ready()
