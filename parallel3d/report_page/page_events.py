"""Messages, checkpoints, spikes and costs of a run, for the page. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any

from parallel3d.costs.rental import HLAT_TOKENS, MILLION, FinishedRun
from parallel3d.monitor.history import MetricsLog, ratios_of
from parallel3d.monitor.loss_ratio import UNSTABLE_RATIO
from parallel3d.monitor.saved_notice import SavedNotice
from parallel3d.monitor.spikes import Spikes
from parallel3d.monitor.uptime import RunHistory
from parallel3d.report_page.scales import MAX_POINTS, format_number

Json = Mapping[str, Any]
MESSAGES = ("notice", "move", "drain", "balance", "preemption", "restart")
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


def dollar_figures(
    lines: Sequence[Json], account: RunHistory, *, now: float | None, dollars_per_hour: float
) -> Iterator[tuple[str, str]]:
    """Names and values of the costs of all legs, recovery included, without the time between them (monitor/uptime.py);
    none before the first tokens. `now`: as for `RunHistory.figures`.

    The costs of evaluations are those of the ones in the final history. The costs for a number of tokens are those of
    the tokens since the first leg's start: a run that goes on from another one's checkpoint has the costs of its own.
    """
    num_tokens = tokens_since_start(lines, account.history_start_step)
    if not num_tokens:
        return
    times_s = account.evaluation_times_s
    rented = FinishedRun(
        price_per_hour=dollars_per_hour,
        seconds=account.paid_time.seconds(now),
        num_evaluations=len(times_s),
        evaluation_s=sum(times_s) / len(times_s) if times_s else 0.0,
        num_tokens=num_tokens,
    )
    yield "dollars so far", f"{rented.gross_dollars:,.2f}"
    yield "dollars of evaluations", f"{rented.evaluation_dollars:,.2f}"
    yield "dollars without evaluations", f"{rented.net_dollars:,.2f}"
    yield "dollars for a million tokens", format_number(rented.dollars_per_mtoken)
    for tokens, what in ((HLAT_TOKENS, "4 million tokens (HLAT's CPT)"), (1e12, "a trillion tokens")):
        yield f"dollars for {what}", format_number(rented.dollars_per_mtoken * tokens / MILLION)


def tokens_since_start(lines: Sequence[Json], start_step: int) -> int:
    """Tokens of the steps after `start_step`, up to the newest."""
    after = [line for line in lines if "event" not in line and line.get("step", 0) > start_step]
    if not after:
        return 0
    first, newest = after[0], after[-1]
    before = first.get("tokens", 0) - first.get("sequence_length", 0) * first.get("num_sequences", 0)
    return int(newest.get("tokens", 0)) - (int(before) if start_step else 0)


def checkpoint_figures(rows: Sequence[CheckpointRow]) -> Iterator[tuple[str, str]]:
    """Names and values of the figures; without a checkpoint none."""
    if rows:
        yield "checkpoints saved", f"{len(rows):,} (newest: step {rows[-1].step:,})"
    if sent := [row.step for row in rows if row.uploaded_at is not None]:
        yield "checkpoints uploaded", f"{len(sent):,} (newest: step {sent[-1]:,})"
