"""Messages, checkpoints and spikes of a run, and the costs of its evaluations, for the page. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any

from parallel3d.costs.rental import FinishedRun
from parallel3d.monitor.history import MetricsLog, ratios_of
from parallel3d.monitor.loss_ratio import UNSTABLE_RATIO
from parallel3d.monitor.saved_notice import SavedNotice
from parallel3d.monitor.spikes import Spikes
from parallel3d.report_page.scales import MAX_POINTS

Json = Mapping[str, Any]
MESSAGES = ("notice", "drain", "balance", "preemption", "restart")
"""Events with a text for people."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """A checkpoint that the run has saved; it may have been removed since."""

    step: int
    megabytes: float
    saved_at: float
    """Seconds since the epoch."""
    uploaded_at: float | None = None
    """The same, if it was sent to a remote store."""


def messages_of(lines: Iterable[Json]) -> list[tuple[float, str]]:
    """Times and texts of the events that have one."""
    return [(line["time"], line["text"]) for line in lines if line.get("event") in MESSAGES and "text" in line]


def checkpoints_of(lines: Iterable[Json], uploads: Iterable[Json]) -> list[CheckpointRow]:
    """Checkpoints by step, from the lines of metrics.jsonl and of uploads.jsonl; the newest save of a step counts."""
    found: dict[int, CheckpointRow] = {}
    for line in lines:
        if line.get("event") == "restart":
            found = {step: row for step, row in found.items() if step <= line["step"]}
        if line.get("event") == "notice" and (saved := SavedNotice.parse(line["text"])):
            found[saved.step] = CheckpointRow(step=saved.step, megabytes=saved.megabytes, saved_at=line["time"])
    for line in uploads:
        row = found.get(line.get("step", -1))
        if row and line.get("event") in ("uploaded", "set_aside"):  # set aside: of a line that the run has left
            found[row.step] = replace(row, uploaded_at=line["time"] if line["event"] == "uploaded" else None)
    return [found[step] for step in sorted(found)]


def gradient_spikes(history: MetricsLog) -> list[tuple[float, float]]:
    """Step and norm of the highest gradient of each spike (monitor/spikes.py)."""
    spikes, inside = Spikes(), []
    for line in history.steps:
        norm = line.get("grad_norm")
        value = nan if norm is None else float(norm)
        spikes = spikes.after(value)
        inside.append((line["step"], value, bool(spikes.length)))
    return _highest_of_each(inside)


def loss_spikes(history: MetricsLog) -> list[tuple[float, float]]:
    """Step and loss of the highest loss of each row of steps above UNSTABLE_RATIO times the lowest loss before."""
    ratios = ratios_of(history)
    points = history.points("loss")
    return _highest_of_each((int(step), loss, ratios.get(int(step), 0.0) > UNSTABLE_RATIO) for step, loss in points)


def _highest_of_each(steps: Iterable[tuple[int, float, bool]]) -> list[tuple[float, float]]:
    """The highest finite value of each row of consecutive marked steps; of too many for a chart, the highest."""
    peaks: list[tuple[float, float]] = []
    was_inside = False
    for step, value, is_inside in steps:
        if is_inside and isfinite(value):
            if not was_inside:
                peaks.append((step, value))
            elif value > peaks[-1][1]:
                peaks[-1] = (step, value)
            was_inside = True
        was_inside = was_inside and is_inside
    return sorted(sorted(peaks, key=lambda each: -each[1])[:MAX_POINTS])


def finished_run(history: MetricsLog, *, wall_s: float, dollars_per_hour: float) -> FinishedRun:
    """The costs of the whole time, and without the evaluations that training waited for."""
    seconds = [float(event["seconds"]) for event in history.events if _is_timed_evaluation(event)]
    return FinishedRun(
        price_per_hour=dollars_per_hour,
        seconds=wall_s,
        num_evaluations=len(seconds),
        evaluation_s=sum(seconds) / len(seconds) if seconds else 0.0,
        num_tokens=history.steps[-1].get("tokens", 0),
    )


def _is_timed_evaluation(event: Json) -> bool:
    return event["event"] == "evaluation" and event.get("seconds") is not None


def checkpoint_figures(rows: Sequence[CheckpointRow]) -> Iterator[tuple[str, str]]:
    """Names and values of the figures; without a checkpoint none."""
    if rows:
        yield "checkpoints saved", f"{len(rows):,} (newest: step {rows[-1].step:,})"
    if sent := [row.step for row in rows if row.uploaded_at is not None]:
        yield "checkpoints uploaded", f"{len(sent):,} (newest: step {sent[-1]:,})"
