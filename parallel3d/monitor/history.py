"""Analyses a run from the lines of its metrics.jsonl. Pure.

    loss ratio     steps above 1.2 and the largest ratio (loss_ratio.py)
    correlations   of the loss ratio with the l1 norm and the largest element of Adam's sqrt(v), as in Table 3 of
                   "Sequence Length Warmup", where both are taken after the step's update. A line has the norms from
                   before its update, so each ratio is paired with the norms of the next line
    spikes         of the gradient norm, by length (spikes.py)
    changes        of membership, with loss ratio and gradient spike at each

`compare_to_reference` compares two runs in both usual ways: tokens and time to the other's best evaluation loss, and
both losses at equal tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

from parallel3d.monitor.correlation import Correlation, correlate
from parallel3d.monitor.loss_ratio import LossRatio
from parallel3d.monitor.spikes import Spikes

Json = dict[str, Any]
Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation: its loss in nats, after `step` steps, `tokens` tokens and `seconds` of training."""

    step: int
    loss: float
    tokens: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MetricsLog:
    """The contents of a metrics.jsonl."""

    steps: tuple[Json, ...]
    events: tuple[Json, ...] = ()

    @staticmethod
    def of(lines: Iterable[Json]) -> MetricsLog:
        """Builds the log from lines; the last line of a repeated step counts."""
        steps: dict[int, Json] = {}
        events = []
        for line in lines:
            if "event" in line:
                events.append(line)
            elif "step" in line:
                steps[line["step"]] = line
        return MetricsLog(steps=tuple(steps[step] for step in sorted(steps)), events=tuple(events))

    def points(self, name: str) -> Points:
        """(step, value) of a figure, for the steps that have it."""
        return [(line["step"], float(line[name])) for line in self.steps if line.get(name) is not None]

    @property
    def losses(self) -> list[float]:
        """Training losses in the order of steps; NaN if not finite."""
        return [nan if (loss := line.get("loss")) is None else float(loss) for line in self.steps]

    @property
    def changes(self) -> list[int]:
        """Steps in which the membership changed."""
        return [event["step"] for event in self.events if event["event"] == "membership"]

    @property
    def widths(self) -> list[tuple[int, list[int]]]:
        """The replicas of each stage from a step on, for the first step and every change of membership; [] without
        any.

        A restart or a resume takes back the changes after its step, and all replicas are there again: those before its
        own first change, or as many as at the start before. A stage that a leg does not have has 0.
        """
        points: list[tuple[int, list[int]]] = []
        complete: list[int] = []
        begin, is_unchanged = self.steps[0]["step"] if self.steps else 0, True
        for event in self.events:
            match event:
                case {"event": "started" | "restart", "step": int(step)}:
                    begin, is_unchanged = step + 1, True
                    points = [point for point in points if point[0] < begin]
                    if points and points[-1][1] != complete:
                        points.append((begin, complete))
                case {"event": "membership", "step": int(step), "widths_before": before, "widths": widths}:
                    if is_unchanged:
                        complete, is_unchanged = before, False
                        points = [point for point in points if point[0] < begin]
                        points += [(begin, before)] if not points or points[-1][1] != before else []
                    points.append((step, widths))
        num_stages = max((len(widths) for _, widths in points), default=0)
        return [(step, [*widths, *[0] * (num_stages - len(widths))]) for step, widths in points]

    @property
    def evaluations(self) -> list[Evaluation]:
        """Evaluations in the order of steps."""
        found = {event["step"]: event for event in self.events if event["event"] == "evaluation"}
        tokens = {0: 0.0} | {line["step"]: float(line.get("tokens", nan)) for line in self.steps}
        seconds, total_s = {0: 0.0}, 0.0
        for line in self.steps:
            total_s += line.get("step_s", 0.0)
            seconds[line["step"]] = total_s
        return [
            Evaluation(
                step=step,
                loss=float(found[step]["loss"]),
                tokens=float(found[step]["tokens"]) if "tokens" in found[step] else tokens.get(step, nan),
                seconds=seconds.get(step, nan),
            )
            for step in sorted(found)
        ]

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the lowest loss; None without any."""
        return min(self.evaluations, key=lambda each: each.loss, default=None)


@dataclass(frozen=True, kw_only=True)
class MembershipChange:
    """A change of membership: the loss ratio of its step, and whether it is within a spike of the gradient norm."""

    step: int
    loss_ratio: float | None
    is_spike: bool


@dataclass(frozen=True, kw_only=True)
class Stability:
    """The stability of a run."""

    loss_ratio: LossRatio
    largest_at: int | None
    """Step of the largest ratio."""
    spikes: Spikes
    with_variance_norm: Correlation | None
    with_variance_max: Correlation | None
    changes: tuple[MembershipChange, ...]


def ratios_of(history: MetricsLog) -> dict[int, float]:
    """Loss ratios by step; the first step and non-finite losses have none."""
    seen, ratios = LossRatio(), {}
    for line, loss in zip(history.steps, history.losses):
        seen = seen.after(loss)
        if seen.newest is not None:
            ratios[line["step"]] = seen.newest
    return ratios


def analyse(history: MetricsLog) -> Stability:
    """The stability of one run."""
    seen, spikes, in_spike = LossRatio(), Spikes(), set()
    for line, loss in zip(history.steps, history.losses):
        norm = line.get("grad_norm")
        seen, spikes = seen.after(loss), spikes.after(nan if norm is None else float(norm))
        if spikes.length:
            in_spike.add(line["step"])
    ratios = ratios_of(history)
    return Stability(
        loss_ratio=seen,
        largest_at=max(ratios, key=lambda step: ratios[step], default=None),
        spikes=spikes,
        with_variance_norm=_correlate_with(history, ratios, "variance_norm"),
        with_variance_max=_correlate_with(history, ratios, "variance_max"),
        changes=tuple(
            MembershipChange(step=step, loss_ratio=ratios.get(step), is_spike=step in in_spike)
            for step in history.changes
        ),
    )


def _correlate_with(history: MetricsLog, ratios: dict[int, float], name: str) -> Correlation | None:
    after = {int(step) - 1: value for step, value in history.points(name)}
    steps = sorted(ratios.keys() & after.keys())
    return correlate([ratios[step] for step in steps], [after[step] for step in steps])


@dataclass(frozen=True, kw_only=True)
class ReferenceComparison:
    """A run compared with a reference run."""

    reference: Evaluation
    """Best evaluation of the reference."""
    reached: Evaluation | None
    """Earliest evaluation of the run that is at least as good; None without one."""
    equal_tokens: float
    """Number of tokens at which both losses are compared."""
    loss: float | None
    reference_loss: float | None
    """Losses there, linear between evaluations; None before a run's first evaluation."""

    @property
    def tokens_saved(self) -> float | None:
        """Share of the reference's tokens that the run did not need; negative if it needed more."""
        return 1.0 - self.reached.tokens / self.reference.tokens if self.reached and self.reference.tokens else None

    @property
    def time_saved(self) -> float | None:
        """Share of the reference's time that the run did not need; negative if it needed more."""
        return 1.0 - self.reached.seconds / self.reference.seconds if self.reached and self.reference.seconds else None


def compare_to_reference(run: MetricsLog, reference: MetricsLog) -> ReferenceComparison | None:
    """Compares two runs; None if one of them has no evaluation."""
    ours, theirs, best = run.evaluations, reference.evaluations, reference.best
    if not ours or best is None:
        return None
    equal = min(ours[-1].tokens, theirs[-1].tokens)
    return ReferenceComparison(
        reference=best,
        reached=next((each for each in ours if each.loss <= best.loss), None),
        equal_tokens=equal,
        loss=_loss_at(ours, equal),
        reference_loss=_loss_at(theirs, equal),
    )


def _loss_at(evaluations: Sequence[Evaluation], tokens: float) -> float | None:
    """The loss after `tokens` tokens, at most those of the last evaluation; None before the first evaluation."""
    for before, after in zip(evaluations, evaluations[1:]):
        if before.tokens <= tokens <= after.tokens and after.tokens > before.tokens:
            share = (tokens - before.tokens) / (after.tokens - before.tokens)
            return before.loss + share * (after.loss - before.loss)
    last = evaluations[-1]
    return last.loss if tokens >= last.tokens else None
