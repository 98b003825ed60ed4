"""A chart of strategies against failures, written without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from parallel3d.goodput.strategies import ComparisonRow

COLOURS = {"restart": "#8a7f72", "rank drop": "#e09f3e", "replica drop": "#2e8b57", "reroute": "#1f4e8c"}
STYLES = ("-", "--", ":", "-.")


def draw_comparison(path: Path, rows: Sequence[ComparisonRow], *, title: str) -> None:
    """Draws goodput over the multiple of the failure rate, a panel for each size; over sizes if there is one multiple.

    Raises OSError or ValueError if the file can't be written.
    """
    sizes = list(dict.fromkeys(row.num_devices for row in rows))
    by_size = len({row.multiple for row in rows}) == 1
    panels = [list(rows)] if by_size else [[row for row in rows if row.num_devices == size] for size in sizes]
    figure = Figure(figsize=(2.4 + 4.2 * len(panels), 4.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for panel, axes in zip(panels, grid[0]):
        _draw_panel(axes, panel, by_size=by_size)
    grid[0, 0].set_ylabel("% of the fault-free throughput")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path)


def _draw_panel(axes: Axes, rows: Sequence[ComparisonRow], *, by_size: bool) -> None:
    numbers = [row.num_devices if by_size else row.multiple for row in rows]
    used: dict[str, int] = {}
    for name in rows[0].estimates:
        kind = name.partition(",")[0].removesuffix(" by hand")
        style = STYLES[used.get(kind, 0) % len(STYLES)]
        used[kind] = used.get(kind, 0) + 1
        goodputs = [100 * row.estimates[name].goodput for row in rows]
        axes.plot(numbers, goodputs, style, marker="o", markersize=3, color=COLOURS[kind], label=name)
    axes.set_xscale("log")
    axes.set_xticks(numbers, [f"{number:,g}" for number in numbers])
    axes.minorticks_off()
    axes.set_ylim(0, 101)
    axes.grid(alpha=0.3)
    axes.set_xlabel("devices" if by_size else "multiple of the failure rate")
    axes.set_title("" if by_size else f"{rows[0].num_devices:,} devices", fontsize=10)
