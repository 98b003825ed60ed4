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

from parallel3d.elastic.pulse import SUSPENDED_FACTOR
from parallel3d.elastic.whereabouts import answer_of
from parallel3d.waits import Answer, draw_standings, link_waits

NUM_STEPS_KNOWN = 100
MIN_STEPS_KNOWN = 3
ANSWER_S = 2.0
"""How long a survey waits for those that do not answer."""


@dataclass(frozen=True, kw_only=True)
class OverdueRule:
    """The two bounds, as in the configuration's section debug."""

    factor: float
    min_s: float


class Pace:
    """How long steps take, from the records of a run; all times from one clock, in seconds."""

    def __init__(self, rule: OverdueRule):
        self._rule = rule
        self._steps: deque[float] = deque(maxlen=NUM_STEPS_KNOWN)
        self._since_s: float | None = None
        """When there was news; None before the first step and after the last."""
        self._num_told = 0
        self._evaluates = False

    def note(self, record: Mapping[str, Any], now_s: float) -> None:
        """A record that a worker has published."""
        match record.get("kind"):
            case "step":
                if "step_s" in record:
                    self._steps.append(record["step_s"])
                self._hear_news(now_s)
            case "evaluating":
                self._hear_news(now_s)
                self._evaluates = True
            case "training" | "evaluation" | "resumed":
                self._hear_news(now_s)
            case "summary":
                self._since_s = None

    @property
    def evaluates(self) -> bool:
        """An evaluation is under way, not a step."""
        return self._evaluates

    def overdue_s(self, now_s: float) -> float | None:
        """Seconds since the last news when that is worth telling; None else. Asking counts as telling."""
        if self._since_s is None or now_s - self._since_s < self.limit_s * 2**self._num_told:
            return None
        self._num_told += 1
        return now_s - self._since_s

    @property
    def limit_s(self) -> float:
        if len(self._steps) < MIN_STEPS_KNOWN:
            return SUSPENDED_FACTOR * self._rule.min_s
        limit_s = max(self._rule.min_s, self._rule.factor * median(self._steps))
        return limit_s * (SUSPENDED_FACTOR if self._evaluates else 1.0)

    def _hear_news(self, now_s: float) -> None:
        self._since_s, self._num_told, self._evaluates = now_s, 0, False


class Survey:
    """One round of questions to `ranks`; `why` heads the table."""

    def __init__(self, why: str, ranks: Iterable[int], places: Mapping[int, str], now_s: float):
        self._why = why
        self._answers = {rank: Answer(rank=rank, place=places.get(rank, "")) for rank in ranks}
        self._silent = set(self._answers)
        self._deadline_s = now_s + ANSWER_S

    def note(self, rank: int, told: dict[str, Any]) -> None:
        if rank in self._silent:
            self._silent.discard(rank)
            self._answers[rank] = answer_of(rank, self._answers[rank].place, told)

    def is_over(self, now_s: float) -> bool:
        return not self._silent or now_s >= self._deadline_s

    def table(self) -> str:
        return f"{self._why}\n{draw_standings(link_waits(list(self._answers.values())))}"
