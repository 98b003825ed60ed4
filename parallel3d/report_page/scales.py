"""Axes and curves: round ticks, and long curves cut into windows. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_POINTS = 300
"""Of a drawn curve: two for each pixel of a narrow chart would be more than one sees."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Windows of a curve: where each one ends, its mean, its lowest and its highest value."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    steps_per_point: int

    @staticmethod
    def of(points: Points) -> Curve:
        """Leaves out values that are not finite. The windows are equally long, but for the last one."""
        shown = [(x, y) for x, y in points if math.isfinite(y)]
        size = max(1, math.ceil(len(shown) / MAX_POINTS))
        windows = [shown[start : start + size] for start in range(0, len(shown), size)]
        return Curve(
            x=[window[-1][0] for window in windows],
            mean=[sum(y for _, y in window) / len(window) for window in windows],
            low=[min(y for _, y in window) for window in windows],
            high=[max(y for _, y in window) for window in windows],
            steps_per_point=size,
        )


@dataclass(frozen=True, kw_only=True)
class Scale:
    """An axis from `low` to `high`, linear or logarithmic, with round ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies: 0.0 at the low end, 1.0 at the high end."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return (at - low) / (high - low)


def linear_scale(
    low: float, high: float, *, from_zero: bool = False, num_ticks: int = 5, least_step: float = 0.0
) -> Scale:
    """A scale that holds both values; its ends are ticks."""
    low = min(low, 0.0) if from_zero else low
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = (low if from_zero else low - margin), low + margin
    step = max(least_step, round_step((high - low) / num_ticks))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Scale(low=ticks[0], high=ticks[-1], ticks=ticks)


def log_scale(low: float, high: float) -> Scale:
    """A scale from a power of ten to another, for positive values."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = math.ceil((last - first) / 5)
    return Scale(
        low=10.0**first,
        high=10.0**last,
        ticks=tuple(10.0**power for power in range(first, last + 1, every)),
        is_log=True,
    )


def round_step(size: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `size`."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= size * (1 - 1e-9))


def format_number(value: float) -> str:
    """A short form: 12,300, 4.06, 1.2e-05."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
