"""Draws a plan: as text for the terminal and as a PNG.

One row is one replica, one column of the text one time unit. A forward is the number of its micro-batch, a backward the
same with a quote, the products for weights of a split backward with a double quote; `-`, `=` and `~` continue them over
further columns, a dot is idle time. Where stages have chunks, 3b is micro-batch 3 in the second of them. One
forward, one backward on 3 stages:

    stage 0   0  1  2  .  .  .  . 0'  =  3 1'  =  . 2'  =  . 3'  =
    stage 1   .  0  1  .  . 0'  =  2 1'  =  3 2'  =  . 3'  =  .  .
    stage 2   .  .  0 0'  =  1 1'  =  2 2'  =  3 3'  =  .  .  .  .
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

from parallel3d.pipeline.instructions import Op, ReplicaId
from parallel3d.pipeline.planner import Event, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {
    Op.FORWARD: "#4C78A8",
    Op.BACKWARD: "#F2A65A",
    Op.BACKWARD_INPUT: "#F2A65A",
    Op.BACKWARD_WEIGHT: "#F8D5A8",
}
_MARKS = {
    Op.FORWARD: ("", "-"),
    Op.BACKWARD: ("'", "="),
    Op.BACKWARD_INPUT: ("'", "="),
    Op.BACKWARD_WEIGHT: ('"', "~"),
}
"""Marks after the number of the micro-batch, and in the columns that follow."""
_IDLE_COLOR = "#F1F3F5"
_REROUTED_COLOR = "#C1121F"
_MAX_INCHES = (24.0, 14.0)


def draw_text(plan: Plan, *, width: int = 120, max_rows: int = 32) -> str:
    """Draws the timeline in at most `width` columns and `max_rows` rows; a last line lists what was left out or scaled.

    If all replicas would be too many rows, only the first of those that run alike are drawn.
    """
    unit = _column_unit(plan)
    num_columns = -(-plan.makespan // unit)
    cell = len(str(len(plan.routes) - 1)) + (3 if plan.request.virtual_stages > 1 else 2)
    labels = {replica: f"{_row_name(plan, replica)} " for replica in plan.lists}
    label_width = max(map(len, labels.values()))
    shown = max(1, min(num_columns, (width - label_width) // cell))
    rows = _rows(plan)
    lines = [
        labels[replica].ljust(label_width)
        + "".join(text.rjust(cell) for text in _cells(plan, rows[replica], unit, shown))
        for replica in _shown_replicas(plan, max_rows)
    ]
    return "\n".join(lines + _notices(plan, unit, num_columns - shown, len(plan.lists) - len(lines)))


def draw_png(plan: Plan, path: Path, *, lost: Sequence[ReplicaId] = (), max_rows: int = 64) -> None:
    """Writes the timeline as a picture of at most `max_rows` rows; needs no display.

    Micro-batches away from their home replica have a red frame; `lost` replicas have a row marked lost.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    live = _shown_replicas(plan, max_rows)
    replicas = sorted([*live, *lost])
    unit = _column_unit(plan)
    width = min(_MAX_INCHES[0], max(9.5, 2.0 + 0.27 * plan.makespan / unit))
    height = min(_MAX_INCHES[1], 1.9 + 0.36 * len(replicas))
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rows = _rows(plan)
    points_per_unit = 72 * (width - 1.5) / plan.makespan
    for row, replica in enumerate(replicas):
        axes.broken_barh([(0, plan.makespan)], (row - 0.42, 0.84), color=_IDLE_COLOR, linewidth=0)
        _draw_row(axes, row, plan, rows[replica], points_per_unit)
        if replica in lost:
            axes.text(plan.makespan / 2, row, "lost", ha="center", va="center", fontsize=9, color=_REROUTED_COLOR)
    cut = f" ({len(live)} of {len(plan.lists)} replicas)" if len(live) < len(plan.lists) else ""
    figure.suptitle(f"{_headline(plan)}{cut}", fontsize=11, x=0.01, ha="left")
    _decorate(axes, plan, replicas)
    figure.savefig(path, dpi=130)


def _headline(plan: Plan) -> str:
    counts = [len(ids) for ids in plan.request.replicas]
    grid = f"{counts[0]}" if len(set(counts)) == 1 else " / ".join(map(str, counts))
    chunks = f", {plan.request.virtual_stages} chunks a stage" if plan.request.virtual_stages > 1 else ""
    schedule = plan.request.name + chunks + (", split backward" if plan.request.split_backward else "")
    return (
        f"{schedule}: {len(counts)} stages x {grid} replicas, {len(plan.routes)} micro-batches, "
        f"makespan {plan.makespan:,}, bubble {plan.bubble:.1%}"
    )


def _draw_row(axes: Axes, row: int, plan: Plan, events: list[Event], points_per_unit: float) -> None:
    num_chunks = plan.request.virtual_stages
    for (op, color), chunk in product(_COLORS.items(), range(num_chunks)):
        spans = [(event.start, event.end - event.start) for event in events if (event.op, event.chunk) == (op, chunk)]
        alpha = 1 - 0.4 * chunk / num_chunks  # later chunks are paler
        axes.broken_barh(spans, (row - 0.42, 0.84), facecolors=color, edgecolors="white", linewidth=0.8, alpha=alpha)
    away = [event for event in events if plan.is_rerouted(event)]
    spans = [(event.start, event.end - event.start) for event in away]
    axes.broken_barh(spans, (row - 0.42, 0.84), facecolors="none", edgecolors=_REROUTED_COLOR, linewidth=1.6, zorder=3)
    for event in events:
        text = _label(plan, event)
        size = min(8.0, points_per_unit * (event.end - event.start) / (0.72 * len(text)))
        if size >= 4:
            center = (event.start + event.end) / 2
            color = "white" if event.op is Op.FORWARD else "#3B2500"
            axes.text(center, row, text, ha="center", va="center", fontsize=size, color=color)


def _decorate(axes: Axes, plan: Plan, replicas: list[ReplicaId]) -> None:
    """Ticks, limits, a thin line between stages, the legend."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, plan.makespan)
    axes.set_ylim(len(replicas) - 0.45, -0.55)
    axes.set_yticks(range(len(replicas)), [_row_name(plan, replica) for replica in replicas], fontsize=8)
    axes.set_xlabel("time units")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for row in range(1, len(replicas)):
        if replicas[row][0] != replicas[row - 1][0] and len(replicas) > len(plan.request.replicas):
            axes.axhline(row - 0.5, color="#ADB5BD", linewidth=0.8)
    present = {event.op for event in plan.events}
    handles = [Patch(color=color, label=op.value) for op, color in _COLORS.items() if op in present]
    handles.append(Patch(color=_IDLE_COLOR, label="idle"))
    if any(map(plan.is_rerouted, plan.events)):
        handles.append(Patch(facecolor="none", edgecolor=_REROUTED_COLOR, linewidth=1.6, label="rerouted"))
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), frameon=False, borderaxespad=0.2
    )


def _shown_replicas(plan: Plan, max_rows: int) -> list[ReplicaId]:
    replicas = sorted(plan.lists)
    if len(replicas) > max_rows:
        first_of_shape = {component.shape: component for component, _ in reversed(plan.runs)}
        replicas = sorted(replica for component in first_of_shape.values() for replica in component.replicas)
    return replicas[:max_rows]


def _rows(plan: Plan) -> dict[ReplicaId, list[Event]]:
    rows: dict[ReplicaId, list[Event]] = defaultdict(list)
    for event in plan.events:
        rows[event.replica].append(event)
    return rows


def _row_name(plan: Plan, replica: ReplicaId) -> str:
    stage, number = replica
    single = all(len(ids) == 1 for ids in plan.request.replicas)
    return f"stage {stage}" if single else f"stage {stage} replica {number}"


def _column_unit(plan: Plan) -> int:
    """Time of one column: 1, or the shortest compute where costs are finer than that."""
    return min(event.end - event.start for event in plan.events)


def _cells(plan: Plan, events: list[Event], unit: int, num_columns: int) -> list[str]:
    """The text of each column: the compute that runs in its middle."""
    cells = ["."] * num_columns
    for event in events:
        first = _column_at_or_after(event.start, unit)
        quote, carry = _MARKS[event.op]
        for column in range(first, min(_column_at_or_after(event.end, unit), num_columns)):
            cells[column] = carry if column > first else f"{_label(plan, event)}{quote}"
    return cells


def _label(plan: Plan, event: Event) -> str:
    """For example 3, or 3b: micro-batch 3 in the second of several chunks."""
    if plan.request.virtual_stages == 1:
        return str(event.micro_batch)
    return f"{event.micro_batch}{ascii_lowercase[event.chunk % len(ascii_lowercase)]}"


def _column_at_or_after(time: int, unit: int) -> int:
    """The first column whose middle, (column + 1/2) * unit, is not before `time`."""
    return -(-(2 * time - unit) // (2 * unit))


def _notices(plan: Plan, unit: int, columns_cut: int, rows_cut: int) -> list[str]:
    notices = []
    if unit > 1:
        notices.append(f"a column is {unit} time units")
    if columns_cut:
        notices.append(f"{columns_cut} more columns to the right")
    if rows_cut:
        notices.append(f"{rows_cut} more replicas, which run like these or would not fit")
    return ["(" + ", ".join(notices) + ")"] if notices else []
