"""Detects slow steps and collects a hang report about them.

A step is slow if it takes `factor` times the median of the steps so far and at least `min_s`; ten times that before
the first median and during evaluations. It is reported again each time the wait has doubled. This only observes:
guardians decide which workers to kill (guardian/heartbeat.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from statistics import median
from typing import Any

from parallel3d.elastic.guardian.heartbeat import SUSPENDED_FACTOR
from parallel3d.elastic.hang_report import HangReport
from parallel3d.elastic.settings import SlowStepRule

MAX_BASELINE_STEPS = 100
MIN_BASELINE_STEPS = 3


class StepTimeBaseline:
    """Step times of a run, from its records. Pure: all times come from the caller's clock, in seconds."""

    def __init__(self, rule: SlowStepRule):
        self._rule = rule
        self._steps: deque[float] = deque(maxlen=MAX_BASELINE_STEPS)
        self._last_progress_s: float | None = None
        """None before the first step and after the last."""
        self._num_reports = 0
        self._evaluates = False

    def add(self, record: Mapping[str, Any], now_s: float) -> None:
        """Adds a record that a worker has published."""
        match record.get("kind"):
            case "step":
                if "step_s" in record:
                    self._steps.append(record["step_s"])
                self._on_progress(now_s)
            case "evaluating":
                self._on_progress(now_s)
                self._evaluates = True
            case "training" | "evaluation" | "resumed":
                self._on_progress(now_s)
            case "summary":
                self._last_progress_s = None

    def current_work(self, last_step: int) -> str:
        """Names the step or evaluation under way."""
        return f"the evaluation after step {last_step}" if self._evaluates else f"step {last_step + 1}"

    def slow_step_s(self, now_s: float) -> float | None:
        """Seconds since the last progress if a report is due, else None. The call counts as the report."""
        if self._last_progress_s is None or now_s - self._last_progress_s < self.limit_s * 2**self._num_reports:
            return None
        self._num_reports += 1
        return now_s - self._last_progress_s

    @property
    def limit_s(self) -> float:
        if len(self._steps) < MIN_BASELINE_STEPS:
            return SUSPENDED_FACTOR * self._rule.min_s
        limit_s = max(self._rule.min_s, self._rule.factor * median(self._steps))
        return limit_s * (SUSPENDED_FACTOR if self._evaluates else 1.0)

    def _on_progress(self, now_s: float) -> None:
        self._last_progress_s, self._num_reports, self._evaluates = now_s, 0, False


class HangReporter:
    """Requests a hang report when a step is slow or a user asks for one, and publishes it.

    `request_status` asks the given workers for their status, and guardians for the stacks. Without a `rule` no step
    counts as slow.
    """

    def __init__(
        self,
        rule: SlowStepRule | None,
        *,
        request_status: Callable[[Collection[int]], None],
        emit_notice: Callable[[str], None],
    ):
        self._baseline = StepTimeBaseline(rule) if rule else None
        self._request_status = request_status
        self._emit_notice = emit_notice
        self._report: HangReport | None = None
        """Under way."""

    def add_record(self, record: Mapping[str, Any], now_s: float) -> None:
        if self._baseline:
            self._baseline.add(record, now_s)

    def add_status(self, rank: int, status: dict[str, Any]) -> None:
        if self._report:
            self._report.add(rank, status)

    def slow_step(self, last_step: int, now_s: float) -> str:
        """Returns the heading of a hang report if one is due, else ""."""
        slow_step_s = self._baseline.slow_step_s(now_s) if self._baseline else None
        if self._baseline is None or slow_step_s is None:
            return ""
        return f"{self._baseline.current_work(last_step)} is slow: no progress for {slow_step_s:.1f} s (stacks: logs/)"

    def begin(self, why: str, coordinates: Mapping[int, str], now_s: float) -> None:
        """Asks the live workers, given with their coordinates, for their status."""
        self._report = HangReport(why, sorted(coordinates), coordinates, now_s)
        self._request_status(coordinates.keys())

    def publish_if_complete(self, now_s: float) -> None:
        if self._report and self._report.is_over(now_s):
            self._emit_notice(self._report.format())
            self._report = None
