"""Norms of weights and of Adam's second moment, as sums and a maximum that the parts of a model add up. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.precision.fixed_point import ExactSum


@dataclass(frozen=True, kw_only=True)
class StateNorms:
    """The norms of some elements; adding two adds the sums and takes the larger maximum."""

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
    """The larger of two numbers; NaN if either is NaN."""
    return first if first >= second or first != first else second
