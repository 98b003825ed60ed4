"""The loss ratio, a measure of unstable training ("Sequence Length Warmup", Li et al. 2022, section 3, Table 1). Pure.

    loss ratio of step t = loss_t / min(loss_0 .. loss_{t-1})

The minimum is over the steps before, so the first step has no ratio. Above 1, a step is worse than the best one so far.
The paper counts steps above 1.2 and reports a run's largest ratio; a run without such steps is stable. A non-finite
loss has no ratio, counts as unstable and is also counted separately.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite

UNSTABLE_RATIO = 1.2
"""Table 1 counts the steps above it."""


@dataclass(frozen=True, kw_only=True)
class LossRatio:
    """Loss ratio figures after the steps so far; immutable."""

    lowest: float = inf
    """Lowest loss so far."""
    newest: float | None = None
    """Ratio of the last step; None for the first one and for a non-finite loss."""
    largest: float | None = None
    num_steps: int = 0
    num_unstable: int = 0
    """Steps above UNSTABLE_RATIO, non-finite losses included."""
    num_not_finite: int = 0

    @property
    def unstable_share(self) -> float:
        """Share of the steps that are unstable."""
        return self.num_unstable / self.num_steps if self.num_steps else 0.0

    def after(self, loss: float) -> LossRatio:
        """The figures after one more step."""
        if not isfinite(loss):
            return replace(
                self,
                newest=None,
                num_steps=self.num_steps + 1,
                num_unstable=self.num_unstable + 1,
                num_not_finite=self.num_not_finite + 1,
            )
        ratio = loss / self.lowest if 0.0 < self.lowest < inf else None
        return replace(
            self,
            lowest=min(self.lowest, loss),
            newest=ratio,
            largest=max((each for each in (self.largest, ratio) if each is not None), default=None),
            num_steps=self.num_steps + 1,
            num_unstable=self.num_unstable + (1 if ratio is not None and ratio > UNSTABLE_RATIO else 0),
        )
