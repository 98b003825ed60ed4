"""Two fits to measurements: memory over the micro-batch, and loss over the global batch. Pure.

Source: the blog on GPT-2 163M. Its measurements of the loss come from machines and batches that differ in more than
their size, so that its optimum is an illustration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, floor, log, sqrt

import numpy as np

Points = Sequence[tuple[float, float]]
NOISE_ERRORS = 2
"""Standard errors up to which a slope is noise."""


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """memory(b) = overhead + per_item * b, in any unit."""

    overhead: float
    per_item: float
    r_squared: float
    error: float
    """Standard error of `per_item`; 0 of two points, which do not scatter."""

    @staticmethod
    def fit(points: Points) -> MemoryLine:
        """Fits (micro-batch, memory) by least squares."""
        (per_item, overhead), r_squared = _fit(points, 1)
        line = MemoryLine(overhead=overhead, per_item=per_item, r_squared=r_squared, error=0.0)
        if len(points) < 3:
            return line
        mean = sum(size for size, _ in points) / len(points)
        rest = sum((memory - line.at(size)) ** 2 for size, memory in points) / (len(points) - 2)
        return replace(line, error=sqrt(rest / sum((size - mean) ** 2 for size, _ in points)))

    def rises(self, least: float) -> bool:
        """Whether an item takes at least this much, and more than the noise of the points (two standard errors)."""
        return self.per_item >= max(least, NOISE_ERRORS * self.error)

    def at(self, micro_batch: float) -> float:
        return self.overhead + self.per_item * micro_batch

    def largest(self, memory: float) -> int:
        """The largest micro-batch that fits; 0 if none does."""
        return max(0, floor((memory - self.overhead) / self.per_item))


@dataclass(frozen=True, kw_only=True)
class BatchCurve:
    """loss(b) = a ln^2 b + c ln b + d over the global batch b."""

    a: float
    c: float
    d: float
    r_squared: float

    @staticmethod
    def fit(points: Points) -> BatchCurve:
        """Fits (global batch, loss) by least squares."""
        (a, c, d), r_squared = _fit([(log(batch), loss) for batch, loss in points], 2)
        return BatchCurve(a=a, c=c, d=d, r_squared=r_squared)

    @property
    def best_batch(self) -> float:
        """The batch of the lowest loss."""
        return exp(-self.c / (2 * self.a))

    def at(self, batch: float) -> float:
        return self.a * log(batch) ** 2 + self.c * log(batch) + self.d

    def penalty(self, batch: float) -> float:
        """The loss above the lowest one."""
        return self.at(batch) - self.at(self.best_batch)


def _fit(points: Points, degree: int) -> tuple[tuple[float, ...], float]:
    """Coefficients, of the highest power first, and the share of the variance that they explain; 0 if there is none."""
    x, y = (np.array(each) for each in zip(*points))
    coefficients = np.polyfit(x, y, degree)
    rest, spread = y - np.polyval(coefficients, x), (y - y.mean()) @ (y - y.mean())
    return tuple(map(float, coefficients)), float(1 - (rest @ rest) / spread) if spread else 0.0
