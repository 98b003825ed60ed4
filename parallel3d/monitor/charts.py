"""The chart of a run's loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

SMOOTHING_SHARE = 0.02
RAW, SMOOTH, EVALUATED, REFERENCE, TEXT = "#9db8d9", "#1f4e8c", "#d1495b", "#8a7f72", "#333333"
CHANGED = "#e09f3e"

Points = Sequence[tuple[float, float]]


def draw_loss(
    path: Path,
    *,
    title: str,
    training: Points,
    evaluations: Points = (),
    membership_changes: Sequence[float] = (),
    unigram_entropy: float | None = None,
) -> None:
    """Writes a PNG of the training loss (step, nats a token): raw, smoothed, with evaluations and a reference line.

    The unigram entropy is the loss of a model that knows only how frequent each token is. A thin vertical line marks
    each step in which the membership changed.
    """
    training = [point for point in training if math.isfinite(point[1])]
    figure = Figure(figsize=(8, 4.8), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = [step for step, _ in training], [loss for _, loss in training]
    axes.plot(steps, losses, color=RAW, linewidth=1, label="training loss")
    if len(losses) > 10:
        axes.plot(steps, smooth(losses), color=SMOOTH, linewidth=2, label="training loss, smoothed")
    if evaluations:
        marks = [point for point in evaluations if math.isfinite(point[1])]
        axes.plot(*zip(*marks), "o-", color=EVALUATED, markersize=5, linewidth=1, label="evaluation loss")
    for number, step in enumerate(membership_changes):
        label = "change of membership" if number == 0 else None
        axes.axvline(step, color=CHANGED, linewidth=1, zorder=1, label=label)
    if unigram_entropy is not None:
        label = f"unigram entropy ({unigram_entropy:.2f})"
        axes.axhline(unigram_entropy, color=REFERENCE, linestyle="--", linewidth=1.2, label=label)
    axes.set_xlabel("step", color=TEXT)
    axes.set_ylabel("loss (nats per token)", color=TEXT)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean over about 2 % of the values to each side, so that it does not lag behind a steep curve."""
    forward, backward = _decayed_means(values), _decayed_means(values[::-1])[::-1]
    return [(before + after) / 2 for before, after in zip(forward, backward)]


def _decayed_means(values: Sequence[float]) -> list[float]:
    """The exponential mean up to each value, corrected for its start at zero."""
    keep = math.exp(-1 / max(1.0, SMOOTHING_SHARE * len(values)))
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        means.append(total / weight)
    return means
