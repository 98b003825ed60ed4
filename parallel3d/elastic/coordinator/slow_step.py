"""When a step is overdue, and the survey that then asks every worker where it is. Pure, but for the clock's readings.

A step is overdue when it takes `factor` times the median of the steps so far, and `min_s` at least; ten times as long
while the run has no median yet or evaluates. It is told again each time the wait has doubled. All of it only looks:
what is given up, and when, is the guardians' to decide (pulse.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from parallel3d.elastic.guardian.heartbeat import SUSPENDED_FACTOR
from parallel3d.elastic.worker.worker_status import parse_worker_status
from parallel3d.wait_graph import WorkerStatus, build_hang_report, format_hang_report

MAX_BASELINE_STEPS = 100
MIN_BASELINE_STEPS = 3
STATUS_TIMEOUT_S = 2.0
"""How long a survey waits for those that do not answer."""


@dataclass(frozen=True, kw_only=True)
class SlowStepRule:
    """The two bounds, as in the configuration's section debug."""

    factor: float
    min_s: float


class StepTimeBaseline:
    """How long steps take, from the records of a run; all times from one clock, in seconds."""

    def __init__(self, rule: SlowStepRule):
        self._rule = rule
        self._steps: deque[float] = deque(maxlen=MAX_BASELINE_STEPS)
        self._last_progress_s: float | None = None
        """When there was news; None before the first step and after the last."""
        self._num_reports = 0
        self._evaluates = False

    def add(self, record: Mapping[str, Any], now_s: float) -> None:
        """A record that a worker has published."""
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

    @property
    def evaluates(self) -> bool:
        """An evaluation is under way, not a step."""
        return self._evaluates

    def slow_step_s(self, now_s: float) -> float | None:
        """Seconds since the last news when that is worth telling; None else. Asking counts as telling."""
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


class HangReport:
    """One round of questions to `ranks`; `why` heads the table."""

    def __init__(self, why: str, ranks: Iterable[int], coordinates: Mapping[int, str], now_s: float):
        self._why = why
        self._statuses = {rank: WorkerStatus(rank=rank, coordinates=coordinates.get(rank, "")) for rank in ranks}
        self._unanswered = set(self._statuses)
        self._deadline_s = now_s + STATUS_TIMEOUT_S

    def add(self, rank: int, status: dict[str, Any]) -> None:
        if rank in self._unanswered:
            self._unanswered.discard(rank)
            self._statuses[rank] = parse_worker_status(rank, self._statuses[rank].coordinates, status)

    def is_over(self, now_s: float) -> bool:
        return not self._unanswered or now_s >= self._deadline_s

    def format(self) -> str:
        return f"{self._why}\n{format_hang_report(build_hang_report(list(self._statuses.values())))}"
