"""A run that another process follows: whether and how it has ended, from where it went on, and what is shown."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path

from parallel3d.checkpoint.store_process import say
from parallel3d.evaluation.saved_results import RunStart, starts_of
from parallel3d.monitor.metrics_tail import GrowingFile
from parallel3d.monitor.run_folder import METRICS, SUMMARY

FIELD = "evaluation"


class FollowedRun(ABC):
    """A run in its folder."""

    def __init__(self, folder: Path, *, since_s: float = 0.0):
        self.folder, self._since_s = folder, since_s
        self._lines = GrowingFile(folder / METRICS)
        self._starts: list[RunStart] = []

    def starts(self) -> list[RunStart]:
        """All starts and restarts so far."""
        is_other, lines = self._lines.read()
        if is_other:
            self._starts = []
        self._starts += starts_of(json.loads(line) for line in lines if b'"event"' in line)
        return self._starts

    @property
    def has_begun(self) -> bool:
        """Whether `starts` has found this start of the run: checkpoints that were there before it may be of others."""
        return any(start.time_s >= self._since_s for start in self._starts)

    @property
    def has_succeeded(self) -> bool:
        """Whether a summary says that the run has reached its end."""
        path = self.folder / SUMMARY
        try:
            return path.stat().st_mtime >= self._since_s and json.loads(path.read_text())["exit_code"] == 0
        except (OSError, ValueError, KeyError):
            return False

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    @abstractmethod
    def is_over(self) -> bool:
        """Whether it has ended."""

    @abstractmethod
    def is_out_of_time(self) -> bool:
        """Whether, after its end, nothing more may be done."""

    def say(self, text: str) -> None:
        """Prints a message."""
        say(f"{FIELD}: {text}")

    @abstractmethod
    def show(self, text: str) -> None:
        """Shows a result."""


class RunByHand(FollowedRun):
    """A run that the user names; the user ends what follows it."""

    def is_over(self) -> bool:
        return (self.folder / SUMMARY).exists()

    def is_out_of_time(self) -> bool:
        return False

    def show(self, text: str) -> None:
        print(text, flush=True)


class RunOfParent(FollowedRun):
    """The run of the process that has started this one, and that closes its standard input at the end. Nothing is done
    after a run that was stopped or has failed: its next start goes on with what is there."""

    def __init__(self, folder: Path, *, since_s: float, end_wait_s: float):
        super().__init__(folder, since_s=since_s)
        self._end_wait_s, self._parent, self._deadline_s = end_wait_s, os.getppid(), float("inf")

    def is_over(self) -> bool:
        return self._look(0.0)

    def wait(self, seconds: float) -> None:
        self._look(seconds)

    def _look(self, wait_s: float) -> bool:
        if self._deadline_s == float("inf"):
            ready, _, _ = select.select([sys.stdin], [], [], wait_s)
            if ready or os.getppid() != self._parent:
                self._deadline_s = time.monotonic() + self._end_wait_s
        return self._deadline_s < float("inf")

    def is_out_of_time(self) -> bool:
        return not self.has_succeeded or time.monotonic() >= self._deadline_s

    def show(self, text: str) -> None:
        """The terminal is the run's."""
