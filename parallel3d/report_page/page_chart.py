"""A chart of the page, as data. Pure."""

from __future__ import annotations

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
class Chart:
    """A chart over training steps."""

    name: str
    title: str
    unit: str
    series: tuple[Series, ...]
    references: tuple[tuple[str, float], ...] = ()
    """Horizontal lines: their labels and values."""
    marks: tuple[tuple[int, str], ...] = ()
    """Vertical lines: changes of membership, of a page with one run."""
    from_zero: bool = False
    is_count: bool = False
    """Whether values are whole numbers, and ticks too."""
