"""The figures of a run as lines for a terminal of any width. Pure.

quickstart  step 128/300 (43%)  running
loss        4.8758  lowest 4.6967; evaluation 5.3268 (step 100)
            ██▆▅▄▄▃▃▃▂▂▂▂▂▂▁▂▁▁▁▁
...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel3d.costs.rental import cost_of_time
from parallel3d.monitor.upload_history import UploadHistory
from parallel3d.report_page.scales import format_number
from parallel3d.report_page.watched_run import WatchedRun, format_widths

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " .:-=+*%#"
MIN_WIDTH = 20
CURVE_ROWS = 4
BOLD, DIM, GREEN, YELLOW, RED, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


@dataclass(frozen=True, kw_only=True)
class Screen:
    """The size and the abilities of a terminal."""

    width: int
    height: int
    has_colours: bool = False
    has_blocks: bool = True
    """Whether its encoding has block characters."""


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """What other files than metrics.jsonl say."""

    name: str
    num_steps: int | None = None
    planned_bubble: float | None = None
    checkpoint_step: int | None = None
    """The step of the newest checkpoint."""
    checkpoint_age_s: float | None = None
    uploads: UploadHistory | None = None
    dollars_per_hour: float | None = None
    read_at: float | None = None
    """Seconds since the epoch: a run that goes on has lasted until then. None: its newest leg has ended."""
    results: tuple[str, ...] = ()
    """Of evaluated checkpoints: the newest main figures."""


def draw_lines(run: WatchedRun, facts: FolderFacts, screen: Screen, *, status: str) -> list[str]:
    """The lines, none wider than the screen, and not more than fit on it."""
    rows = [(facts.name, f"{_progress(run, facts)}  {status}"), *_rows(run, facts)]
    label_width = min(11, screen.width // 3)
    value_width = max(1, screen.width - label_width - 1)
    lines = [
        _coloured(label, value, label_width, value_width, is_title=number == 0, has_colours=screen.has_colours)
        for number, (label, value) in enumerate(rows)
    ]
    num_rows = min(CURVE_ROWS, screen.height - len(lines) - 1)
    if num_rows > 0:
        blocks = BLOCKS if screen.has_blocks else ASCII_BLOCKS
        drawn = draw_curve(run.losses, width=value_width, rows=num_rows, blocks=blocks)
        lines[2:2] = [f"{'':<{label_width}} {_paint(GREEN, row, screen.has_colours)}" for row in drawn]
    return lines[: max(1, screen.height - 1)]


def describe_in_a_line(run: WatchedRun, facts: FolderFacts) -> str:
    """The newest step as one line for a log."""
    rows = [f"{label} {value}" for label, value in _rows(run, facts) if label not in _ONLY_ON_A_SCREEN]
    return "  ".join([_progress(run, facts), *rows])


def draw_curve(values: Sequence[float], *, width: int, rows: int, blocks: str = BLOCKS) -> list[str]:
    """A curve of blocks from the lowest to the highest value, from the top row to the bottom one; [] without values.

    Each column is the mean of as many values, NaN and infinite ones left out; fewer values than columns have one each.
    """
    size = max(1, math.ceil(len(values) / width))
    windows = [
        [value for value in values[start : start + size] if math.isfinite(value)]
        for start in range(0, len(values), size)
    ]
    means = [sum(window) / len(window) if window else math.nan for window in windows]
    shown = [mean for mean in means if math.isfinite(mean)]
    if not shown:
        return []
    low, high, levels = min(shown), max(shown), rows * (len(blocks) - 1)
    heights = [_height(mean, low, high, levels) for mean in means]
    per_row = len(blocks) - 1
    return [
        "".join(blocks[min(max(height - row * per_row, 0), per_row)] for height in heights).rstrip()
        for row in reversed(range(rows))
    ]


def format_duration(seconds: float) -> str:
    """For example 2:09, 1:02:09 or 3 d 4:00:00."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    clock = f"{hours}:{minutes:02}:{whole % 60:02}" if hours or days else f"{minutes}:{whole % 60:02}"
    return f"{days} d {clock}" if days else clock


def _height(mean: float, low: float, high: float, levels: int) -> int:
    if not math.isfinite(mean):
        return 0
    return 1 + round((mean - low) / (high - low) * (levels - 1)) if high > low else 1


def _progress(run: WatchedRun, facts: FolderFacts) -> str:
    if not facts.num_steps:
        return f"step {run.step:,}"
    return f"step {run.step:,}/{facts.num_steps:,} ({run.step / facts.num_steps:.0%})"


_ONLY_ON_A_SCREEN = ("loss ratio", "spikes", "seq. length", "changes", "last loss", "last return", "evaluated")


def _rows(run: WatchedRun, facts: FolderFacts) -> Iterator[tuple[str, str]]:
    """Labels and values of the figures that there are."""
    line = run.newest
    if (loss := line.get("loss")) is not None:
        yield "loss", f"{float(loss):.4f}{_other_losses(run)}"
    if (ratio := line.get("loss_ratio")) is not None:
        yield "loss ratio", f"{float(ratio):.4f} (to the lowest loss before)"
    if run.spikes:
        yield "spikes", f"{len(run.spikes):,} of the gradient norm, the last one at step {run.spikes[-1]:,}"
    if (rate := line.get("lr")) is not None:
        yield "lr", format_number(float(rate))
    if (speed := line.get("mean_tokens_per_s", line.get("tokens_per_s"))) is not None:
        yield "tokens/s", f"{float(speed):,.0f}{f' ({run.step_s:.3g} s a step)' if run.step_s else ''}"
    if (mfu := line.get("mfu")) is not None:
        yield "MFU", f"{float(mfu):.1%}"
    if (bubble := line.get("bubble")) is not None:
        planned = line.get("planned_bubble", facts.planned_bubble)
        yield "bubble", f"{float(bubble):.1%}{'' if planned is None else f' (planned {float(planned):.1%})'}"
    if (wait := line.get("data_wait_s")) is not None:
        yield "data wait", f"{float(wait):.3f} s"
    if (size := line.get("memory_bytes")) is not None:
        yield "memory", f"{float(size) / 1e6:,.0f} MB"
    if widths := run.widths:
        yield "width", format_widths(widths)
    if (tokens := line.get("tokens")) is not None:
        yield "tokens", f"{int(tokens):,}{_all_tokens(run, facts, int(tokens))}"
    if (length := line.get("sequence_length")) is not None:
        yield "seq. length", f"{int(length):,}"
    if facts.dollars_per_hour is not None:
        yield "cost", f"${cost_of_time(facts.dollars_per_hour, run.paid_time.seconds(facts.read_at)):,.2f}"
    if facts.num_steps and run.step_s and run.step < facts.num_steps:
        yield "ETA", format_duration((facts.num_steps - run.step) * run.step_s)
    yield from _events(run, facts)


def _events(run: WatchedRun, facts: FolderFacts) -> Iterator[tuple[str, str]]:
    if facts.checkpoint_step is not None:
        age = "" if facts.checkpoint_age_s is None else f", {format_duration(facts.checkpoint_age_s)} ago"
        yield "checkpoint", f"step {facts.checkpoint_step:,}{age}"
    if (uploads := facts.uploads) is not None:
        behind = f", {len(uploads.behind)} missing: {uploads.problem}" if uploads.behind else ""
        newest = "none yet" if uploads.newest_step is None else f"step {uploads.newest_step:,}"
        yield "upload", f"{newest}{behind}"
    if run.num_restarts:
        yield "restarts", f"{run.num_restarts:,}"
    if run.changes:
        yield "changes", f"{run.num_lost:,} workers lost, {run.num_joined:,} joined"
    for change in reversed(run.changes):
        cost = "" if change.seconds is None else f"{change.seconds:.2f} s, "
        label = "last return" if "joins" in change.text else "last loss"
        yield label, f"step {change.step:,}: {cost}{format_widths(change.widths)}, {change.text}"
    for text in facts.results:
        yield "evaluated", text


def _other_losses(run: WatchedRun) -> str:
    parts = [f"lowest {lowest:.4f}"] if (lowest := run.lowest_loss) is not None else []
    if run.evaluation is not None:
        parts.append(f"evaluation {run.evaluation[1]:.4f} (step {run.evaluation[0]:,})")
    if run.best_evaluation is not None and run.best_evaluation != run.evaluation:
        parts.append(f"best {run.best_evaluation[1]:.4f} (step {run.best_evaluation[0]:,})")
    return f"  {'; '.join(parts)}" if parts else ""


def _all_tokens(run: WatchedRun, facts: FolderFacts, tokens: int) -> str:
    """The tokens of the whole run, where each step has as many as the newest ones."""
    if not facts.num_steps or run.step < 1 or run.step >= facts.num_steps:
        return ""
    return f" of about {tokens / run.step * facts.num_steps:,.0f}"


def _coloured(label: str, value: str, label_width: int, value_width: int, *, is_title: bool, has_colours: bool) -> str:
    label = label[:label_width]
    value = value if len(value) <= value_width else f"{value[: value_width - 1]}~"
    code = YELLOW if label.startswith("last loss"[:label_width]) else BOLD if is_title else ""
    value = _paint(code, value.rstrip(), has_colours)
    return f"{_paint(BOLD if is_title else DIM, f'{label:<{label_width}}', has_colours)} {value}"


def _paint(code: str, text: str, has_colours: bool) -> str:
    return f"{code}{text}{PLAIN}" if has_colours and code and text else text
