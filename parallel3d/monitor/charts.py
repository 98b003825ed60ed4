"""Charts of a run, written as PNG files without a display.

    loss.png          the loss alone: mean and band, evaluations, the best evaluation
    course.png        loss, learning rate, gradient norm and its clipping, Adam's sqrt(v), weights, sequence length, the
                      replicas of each stage
    instability.png   loss, loss ratio and sqrt(v), each divided by its maximum, in one picture, as in Figure 1 (g) and
                      (h) of "Sequence Length Warmup" (Li et al. 2022)

A thin vertical line marks each step in which the membership changed. Panels without data are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from parallel3d.monitor.history import MetricsLog, ratios_of
from parallel3d.monitor.run_folder import CHARTS

LOSS, COURSE, INSTABILITY = CHARTS
SMOOTHING_SHARE = 0.02
RAW, SMOOTH, EVALUATED, REFERENCE, TEXT = "#9db8d9", "#1f4e8c", "#d1495b", "#8a7f72", "#333333"
CHANGED, BEST, CLIPPED, SECOND = "#e09f3e", "#2e8b57", "#d1495b", "#7b5ea7"
NUM_BANDS = 100
"""Windows of steps whose lowest and highest values form the band."""
MIN_BAND_STEPS = 6
"""With shorter windows, single steps are drawn instead of a band."""
MAX_DRAWN = 1e6
"""Upper limit of drawn gradient norms, infinite ones included."""

REPLICAS = "replicas"
_SIDE_BY_SIDE = 0.06
"""Between the lines of two stages, in replicas."""

Points = Sequence[tuple[float, float]]


def draw_all(
    folder: Path, history: MetricsLog, *, title: str, config: dict[str, Any], entropy: float | None
) -> list[str]:
    """Writes all charts and returns their names; needs two steps. `entropy` is that of unigrams, in nats."""
    if len(history.points("loss")) < 2:
        return []
    limit = config.get("optimizer", {}).get("max_grad_norm")
    draw_loss(folder / LOSS, title=title, history=history, unigram_entropy=entropy)
    draw_course(folder / COURSE, title=title, history=history, max_grad_norm=limit)
    draw_instability(folder / INSTABILITY, title=title, history=history)
    return [LOSS, COURSE, INSTABILITY]


def draw_loss(path: Path, *, title: str, history: MetricsLog, unigram_entropy: float | None = None) -> None:
    """Draws the training loss (nats per token) by step, with evaluations.

    A line marks the unigram entropy: the loss of a model that knows only how frequent each token is.
    """
    figure = _figure(height=4.8)
    axes = figure.add_subplot()
    _draw_loss(axes, history, unigram_entropy)
    _finish(axes, title=title)
    axes.set_xlabel("step", color=TEXT)
    figure.savefig(path)


def draw_course(path: Path, *, title: str, history: MetricsLog, max_grad_norm: float | None = None) -> None:
    """Draws all figures of a run, one panel below the other; `max_grad_norm` draws the clipping limit."""
    lengths = {value for _, value in history.points("sequence_length")}
    left_out = {"sequence_length"} if len(lengths) < 2 else set()
    panels = [name for name in _PANELS if name not in left_out and (name == "loss" or history.points(name))]
    panels += [REPLICAS] if history.widths else []
    figure = _figure(height=1.2 + 1.7 * (len(panels) + 1))
    heights = [2.4 if name == "loss" else 1.0 for name in panels]
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw=dict(height_ratios=heights))
    for name, axes in zip(panels, grid[:, 0]):
        if name == REPLICAS:
            _draw_replicas(axes, history)
        else:
            _draw_panel(axes, name, history, max_grad_norm)
        _finish(axes, title=title if name == "loss" else "")
    grid[-1, 0].set_xlabel("step", color=TEXT)
    figure.savefig(path)


def draw_instability(path: Path, *, title: str, history: MetricsLog) -> None:
    """Draws loss, loss ratio and sqrt(v), each divided by its maximum."""
    ratios = sorted(ratios_of(history).items())
    series: list[tuple[str, Points, str]] = [
        ("training loss", history.points("loss"), RAW),
        ("loss ratio", ratios, SMOOTH),
        ("l1 norm of sqrt(v)", history.points("variance_norm"), SECOND),
        ("largest sqrt(v)", history.points("variance_max"), EVALUATED),
    ]
    figure = _figure(height=4.8)
    axes = figure.add_subplot()
    for label, points, colour in series:
        shown = [(step, value) for step, value in points if math.isfinite(value)]
        largest = max((value for _, value in shown), default=0.0)
        if largest > 0.0:
            steps, values = zip(*shown)
            axes.plot(
                steps,
                [value / largest for value in values],
                color=colour,
                linewidth=1.3,
                label=f"{label} (largest: {largest:.3g})",
            )
    axes.set_ylabel("share of the maximum", color=TEXT)
    axes.set_ylim(0.0, 1.05)
    _mark_changes(axes, history)
    _finish(axes, title=title)
    axes.set_xlabel("step", color=TEXT)
    axes.legend(
        frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=3
    )  # below: the lines cover the whole panel
    figure.savefig(path)


# --- panels -----------------------------------------------------------------------------------------------------------

_PANELS = {
    "loss": "loss (nats per token)",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "variance_norm": "l1 norm of\nsqrt(v)",
    "variance_max": "largest\nsqrt(v)",
    "param_norm": "l2 norm of\nweights",
    "sequence_length": "sequence\nlength",
    "mean_tokens_per_s": "tokens/s",
}


def _draw_panel(axes: Axes, name: str, history: MetricsLog, max_grad_norm: float | None) -> None:
    if name == "loss":
        _draw_loss(axes, history, None)
        return
    points = [(step, min(value, MAX_DRAWN) if name == "grad_norm" else value) for step, value in history.points(name)]
    if name == "grad_norm":
        _draw_band(axes, points, label="gradient norm")
        if max_grad_norm is not None:
            axes.axhline(
                max_grad_norm, color=CLIPPED, linestyle="--", linewidth=1.1, label=f"clipped above {max_grad_norm:g}"
            )
        if points and max(y for _, y in points) > 20 * sorted(y for _, y in points)[len(points) // 2]:
            axes.set_yscale("log")
    else:
        steps, values = zip(*points)
        style = "steps-post" if name == "sequence_length" else "default"
        axes.plot(steps, values, color=SMOOTH, linewidth=1.3, drawstyle=style)
    if name in ("sequence_length", "mean_tokens_per_s"):
        axes.set_ylim(bottom=0.0)
    axes.set_ylabel(_PANELS[name], color=TEXT)
    _mark_changes(axes, history, with_label=False)


def _draw_replicas(axes: Axes, history: MetricsLog) -> None:
    """The width of each stage over time; lines of equal widths lie side by side."""
    steps = [step for step, _ in history.widths]
    last_step = max(history.steps[-1]["step"], history.widths[-1][0])
    num_stages = len(history.widths[0][1])
    for stage in range(num_stages):
        widths = [each[stage] + _SIDE_BY_SIDE * (stage - (num_stages - 1) / 2) for _, each in history.widths]
        axes.step([*steps, last_step], [*widths, widths[-1]], where="post", linewidth=1.3, label=f"stage {stage}")
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(REPLICAS, color=TEXT)
    _mark_changes(axes, history, with_label=False)


def _draw_loss(axes: Axes, history: MetricsLog, unigram_entropy: float | None) -> None:
    _draw_band(axes, history.points("loss"), label="training loss")
    evaluations, best = [each for each in history.evaluations if math.isfinite(each.loss)], history.best
    if evaluations:
        steps, losses = [each.step for each in evaluations], [each.loss for each in evaluations]
        axes.plot(steps, losses, "o-", color=EVALUATED, markersize=4, linewidth=1.2, label="evaluation loss")
    if best is not None and len(evaluations) > 1:
        axes.axvline(best.step, color=BEST, linewidth=1.2, linestyle=":", label=f"best: step {best.step}")
    if unigram_entropy is not None:
        label = f"unigram entropy ({unigram_entropy:.2f})"
        axes.axhline(unigram_entropy, color=REFERENCE, linestyle="--", linewidth=1.2, label=label)
    axes.set_ylabel(_PANELS["loss"], color=TEXT)
    _mark_changes(axes, history)


def _draw_band(axes: Axes, points: Points, *, label: str) -> None:
    """Smoothed values over the single ones, or over a band from lowest to highest when there are many."""
    points = [point for point in points if math.isfinite(point[1])]
    steps, values = [step for step, _ in points], [value for _, value in points]
    if len(points) >= MIN_BAND_STEPS * NUM_BANDS:
        middles, lows, highs = bands(points)
        axes.fill_between(middles, lows, highs, color=RAW, alpha=0.6, linewidth=0, label=f"{label}, lowest to highest")
    else:
        axes.plot(steps, values, color=RAW, linewidth=1, label=label)
    if len(values) > 10:
        axes.plot(steps, smooth(values), color=SMOOTH, linewidth=1.8, label=f"{label}, smoothed")


def _mark_changes(axes: Axes, history: MetricsLog, *, with_label: bool = True) -> None:
    for number, step in enumerate(history.changes):
        label = "change of membership" if with_label and number == 0 else None
        axes.axvline(step, color=CHANGED, linewidth=1, zorder=1, label=label)


def _figure(*, height: float) -> Figure:
    figure = Figure(figsize=(8, height), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _finish(axes: Axes, *, title: str) -> None:
    if title:
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(x=0.01)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8 if not title else 9)


# --- curves -----------------------------------------------------------------------------------------------------------


def bands(points: Points) -> tuple[list[float], list[float], list[float]]:
    """Middle, lowest and highest value of about NUM_BANDS windows of steps; the outer middles are the curve's ends."""
    size = math.ceil(len(points) / NUM_BANDS)
    windows = [points[start : start + size] for start in range(0, len(points), size)]
    middles = [(window[0][0] + window[-1][0]) / 2 for window in windows]
    middles[0], middles[-1] = points[0][0], points[-1][0]
    return (
        middles,
        [min(value for _, value in window) for window in windows],
        [max(value for _, value in window) for window in windows],
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean over about 2 % of the values in both directions, so that it does not lag on a steep curve."""
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
