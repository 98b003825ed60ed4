"""What is measured of weights and of Adam's second moment: sums and a maximum that parts of the model join. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.precision.fixed_point import ExactSum


@dataclass(frozen=True, kw_only=True)
class StateNorms:
    """Of some elements; of several parts the sums add up, and the largest is the larger."""

    squared_weights: ExactSum = ExactSum()
    """Sum of the squared weights."""
    variance: ExactSum = ExactSum()
    """Sum of sqrt(v): its l1 norm."""
    variance_max: float = 0.0
    """The largest sqrt(v)."""

    def __add__(self, other: StateNorms) -> StateNorms:
        return StateNorms(
            squared_weights=self.squared_weights + other.squared_weights,
            variance=self.variance + other.variance,
            variance_max=larger(self.variance_max, other.variance_max),
        )


def larger(first: float, second: float) -> float:
    """The larger of two; NaN where one of them is."""
    return first if first >= second or first != first else second
