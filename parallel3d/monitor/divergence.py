"""Decides when training has diverged for good. Pure.

"Sequence Length Warmup" (Li et al. 2022, section 5.2, Figure 6) saw the largest element of Adam's sqrt(v) become a flat
line after divergence: gradients so large that all of them are clipped. A loss spike from which the run recovers looks
the same for a while, so the flat-line rule requires all of this for n updates in a row:

    loss and mean loss are more than 1.2 times the lowest mean so far, and every gradient was clipped
    the largest sqrt(v) stays within 10 %
    the mean loss of the second half is not below that of the first half: nothing recovers

The mean loss is exponential over 20 steps, since single losses of small batches scatter far above the lowest one. n is
the time in which sqrt(v) halves when gradients vanish, n = 2 ln 2 / -ln(beta2), at least 20: over that time the line is
flat only if large gradients keep feeding it (27 updates at beta2 0.95, 1386 at 0.999).

A second, optional rule: a loss above `max_loss_ratio` times the lowest so far. Non-finite losses and gradients are
judged by the trainer (trainer/divergence_check.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite, log

from parallel3d.monitor.loss_ratio import UNSTABLE_RATIO

FLAT = 1.1
MIN_FLAT_UPDATES = 20
SMOOTHING_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class DivergenceRules:
    """The rules for divergence."""

    beta2: float | None = 0.95
    max_loss_ratio: float | None = None
    ends_run: bool = True
    """Whether divergence ends the run; else it is only reported."""

    @property
    def num_flat(self) -> int:
        """Number of updates over which the largest sqrt(v) must be flat."""
        half_life = -2.0 * log(2.0) / log(self.beta2) if self.beta2 else 0.0
        return max(MIN_FLAT_UPDATES, round(half_life))


@dataclass(frozen=True, kw_only=True)
class FlatStreak:
    """Consecutive updates with a high loss, clipped gradients and a flat line."""

    num_updates: int = 0
    lowest: float = inf
    highest: float = 0.0
    """Bounds of the largest sqrt(v) in them."""
    first_half: float = 0.0
    second_half: float = 0.0
    """Sums of the losses in each half."""


NO_STREAK = FlatStreak()


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The signs of divergence after the steps so far; immutable."""

    rules: DivergenceRules = DivergenceRules()
    num_steps: int = 0
    mean_loss: float = 0.0
    """Exponential mean over SMOOTHING_STEPS."""
    lowest_mean: float = inf
    """Lowest mean loss since there were SMOOTHING_STEPS of them."""
    row: FlatStreak = NO_STREAK
    reason: str = ""
    """Why the newest step shows divergence; empty when it does not."""

    def after(
        self, *, loss: float, loss_ratio: float | None, is_clipped: bool, variance_max: float | None
    ) -> Divergence:
        """The signs after one more step; `variance_max` is None if it was not measured."""
        if not isfinite(loss):
            return replace(self, row=NO_STREAK, reason="")
        seen = self._with_loss(loss)
        limit = self.rules.max_loss_ratio
        if limit is not None and loss_ratio is not None and loss_ratio > limit:
            reason = f"the loss is {loss_ratio:.2f} times the lowest before, monitor.max_loss_ratio is {limit:g}"
            return replace(seen, row=NO_STREAK, reason=reason)
        if not is_clipped or min(loss, seen.mean_loss) <= UNSTABLE_RATIO * seen.lowest_mean:
            return replace(seen, row=NO_STREAK)
        row = _with_variance(self.row, variance_max)
        return seen._check_streak(_with_loss(row, loss, self.rules.num_flat // 2))

    def _with_loss(self, loss: float) -> Divergence:
        """The mean loss after one more loss; clears the reason."""
        count = min(self.num_steps + 1, SMOOTHING_STEPS)
        mean = self.mean_loss + (loss - self.mean_loss) / count
        lowest = min(self.lowest_mean, mean) if count == SMOOTHING_STEPS else inf
        return replace(self, num_steps=self.num_steps + 1, mean_loss=mean, lowest_mean=lowest, reason="")

    def _check_streak(self, row: FlatStreak) -> Divergence:
        """Judges a streak once it is long enough, and starts a new one."""
        half = self.rules.num_flat // 2
        if row.num_updates < self.rules.num_flat or row.highest == 0.0:
            return replace(self, row=row)
        if row.second_half / (row.num_updates - half) < row.first_half / half:
            return replace(self, row=NO_STREAK)  # the loss recovers
        reason = (
            f"for {row.num_updates} updates the loss was more than {UNSTABLE_RATIO:g} times its lowest mean, all"
            f" gradients were clipped, and Adam's largest sqrt(v) was flat ({row.lowest:.3g} to {row.highest:.3g})"
        )
        return replace(self, row=NO_STREAK, reason=reason)


def _with_variance(row: FlatStreak, value: float | None) -> FlatStreak:
    """The streak with one more value of the line; starts over when the line is not flat."""
    if value is None:
        return row
    lowest, highest = min(row.lowest, value), max(row.highest, value)
    if highest <= FLAT * lowest and isfinite(highest):
        return replace(row, lowest=lowest, highest=highest)
    return FlatStreak(lowest=value, highest=value) if isfinite(value) else NO_STREAK


def _with_loss(row: FlatStreak, loss: float, half: int) -> FlatStreak:
    """The streak with one more update, of which the first `half` count as first half."""
    if row.num_updates < half:
        return replace(row, num_updates=row.num_updates + 1, first_half=row.first_half + loss)
    return replace(row, num_updates=row.num_updates + 1, second_half=row.second_half + loss)
