"""A chart of the page, as data. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel3d.report_page.scales import Curve


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve of a chart: a line with its band, steps of a staircase, the same dashed for what was planned, dots, rings
    round spikes, or a line through dots with their standard errors."""

    run: int
    label: str
    curve: Curve
    kind: str = "line"
    errors: tuple[float | None, ...] = ()
    """Standard errors of a curve of kind "errors"; None where none is known."""


@dataclass(frozen=True, kw_only=True)
class ReferenceLine:
    """A horizontal line: of one run, in its colour, or of all."""

    label: str
    value: float
    run: int | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart over training steps."""

    name: str
    title: str
    unit: str
    series: tuple[Series, ...]
    references: tuple[ReferenceLine, ...] = ()
    marks: tuple[tuple[int, str], ...] = ()
    """Vertical lines: changes of membership, of a page with one run."""
    from_zero: bool = False
    is_count: bool = False
    """Whether values are whole numbers, and ticks too."""


def reference_lines(label: str, values: Sequence[float | None], names: Sequence[str]) -> tuple[ReferenceLine, ...]:
    """A line for each run's value, with the run's name; one for all where all have the same. None: it has no value."""
    first = values[0]
    if len({*values}) == 1:
        return () if first is None else (ReferenceLine(label=label, value=first),)
    return tuple(
        ReferenceLine(label=f"{name}, {label}", value=value, run=number)
        for number, (name, value) in enumerate(zip(names, values))
        if value is not None
    )
