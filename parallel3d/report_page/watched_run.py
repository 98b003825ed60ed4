"""The newest figures of a run, from the lines of its metrics.jsonl as they come. Pure.

It holds one line and the losses, not the whole history, so that it can follow long runs.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel3d.monitor.paid_time import PaidTime

Json = Mapping[str, Any]
STEP_TIMES = 50
"""Newest steps whose mean time gives the time that is left."""
MAX_CHANGES = 5
"""Newest changes of membership that are kept."""


@dataclass(frozen=True, kw_only=True)
class WidthChange:
    """A loss or a return of workers, as a line of text, and the replicas of each stage after it."""

    step: int
    text: str
    widths: tuple[int, ...]
    seconds: float | None


@dataclass(kw_only=True)
class WatchedRun:
    """The newest figures. Losses are indexed from `first_step` on; NaN where a step has none."""

    newest: Json = field(default_factory=dict)
    """The line of the newest step; {} before the first."""
    first_step: int = 0
    losses: array[float] = field(default_factory=lambda: array("d"))
    step_times_s: list[float] = field(default_factory=list)
    evaluation: tuple[int, float] | None = None
    """Step and loss of the newest evaluation."""
    best_evaluation: tuple[int, float] | None = None
    spikes: list[int] = field(default_factory=list)
    """Steps in which a spike of the gradient norm began."""
    num_lost: int = 0
    num_joined: int = 0
    num_restarts: int = 0
    changes: list[WidthChange] = field(default_factory=list)
    widths: tuple[int, ...] = ()
    """Replicas of each stage; () before the first change since the newest start."""
    starts: list[Json] = field(default_factory=list)
    """Lines of starts and restarts: results of steps that the run has left behind don't count."""
    paid_time: PaidTime = field(default_factory=PaidTime)

    @property
    def step(self) -> int:
        """The newest step; 0 before the first."""
        return int(self.newest.get("step", 0))

    @property
    def lowest_loss(self) -> float | None:
        return min((loss for loss in self.losses if math.isfinite(loss)), default=None)

    @property
    def step_s(self) -> float | None:
        """Mean seconds of the newest steps."""
        return sum(self.step_times_s) / len(self.step_times_s) if self.step_times_s else None

    def add(self, line: Json) -> None:
        """Takes the next line of the file."""
        self.paid_time.log(line)
        if line.get("event") in ("started", "restart"):
            self.starts.append(line)
            self.widths = ()
        match line:
            case {"event": "evaluation", "step": int(step), "loss": loss}:
                self._add_evaluation(step, float(loss))
            case {"event": "membership"}:
                self._add_change(line)
            case {"event": "restart", "step": int(step)}:
                self.num_restarts += 1
                del self.losses[max(0, step - self.first_step + 1) :]
                self.step_times_s.clear()
            case {"event": _}:
                return
            case {"step": int(step)}:
                self._add_step(step, line)

    def _add_step(self, step: int, line: Json) -> None:
        if not self.newest:
            self.first_step = step
        loss, index = line.get("loss"), max(0, step - self.first_step)
        del self.losses[index:]  # a repeated step replaces the one before
        self.losses.extend([math.nan] * (index - len(self.losses)))
        self.losses.append(math.nan if loss is None else float(loss))
        self.newest = line
        self.spikes = [begin for begin in self.spikes if begin < step] if self.spikes else []
        if line.get("grad_spike") == 1:
            self.spikes.append(step)
        if seconds := line.get("step_s"):
            self.step_times_s = [*self.step_times_s, float(seconds)][-STEP_TIMES:]

    def _add_evaluation(self, step: int, loss: float) -> None:
        self.evaluation = step, loss
        if self.best_evaluation is None or loss <= self.best_evaluation[1]:
            self.best_evaluation = self.evaluation

    def _add_change(self, line: Json) -> None:
        gone, joined = line.get("who", ()), line.get("joined", ())
        self.num_lost, self.num_joined = self.num_lost + len(gone), self.num_joined + len(joined)
        change = WidthChange(
            step=int(line["step"]),
            text=describe_change(line),
            widths=tuple(line.get("widths", ())),
            seconds=seconds_of_change(line),
        )
        self.changes, self.widths = [*self.changes, change][-MAX_CHANGES:], change.widths


def describe_change(event: Json) -> str:
    """Who was lost and why, or who joins."""
    joined = [f"worker {each['rank']} ({each['coordinates']}) joins" for each in event.get("joined", [])]
    return "; ".join([*([str(event["why"])] if event.get("who") or not joined else []), *joined])


def seconds_of_change(event: Json) -> float | None:
    """Seconds from the death to regrouping, as far as they are known; the first step after it is training."""
    parts = [event.get(name) for name in ("detect_s", "agree_s", "repair_s", "regroup_s")]
    known = [float(part) for part in parts if part is not None and math.isfinite(float(part))]
    return sum(known) if known else None


def format_widths(widths: Sequence[int] | None) -> str:
    """For example 2/1: two replicas of the first stage, one of the second."""
    return "/".join(map(str, widths)) if widths else "?"
