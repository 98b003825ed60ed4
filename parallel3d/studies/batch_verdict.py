"""Judges a curve of the loss over the global batch, at equal tokens: where is its minimum, and is it credible? Pure.

The curve is loss(b) = a ln^2 b + c ln b + d (parallel3d/costs/fits.py). Its minimum is only an illustration if the
curve has none, if it lies outside the batches that were run, if there are too few points to contradict the curve, if
the curve misses them, or if the seeds' noise is as large as what the batch changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_POINTS = 4
"""Three are met by every parabola."""
GOOD_FIT = 0.9
"""Share of the losses' variance that a curve to be believed explains."""
CLEAR_SDS = 2.0
"""Standard deviations of the seeds that the largest loss must be above the smallest."""


@dataclass(frozen=True, kw_only=True)
class BatchVerdict:
    """The batch to take, and what speaks against trusting it."""

    best_measured: int
    """The batch with the lowest loss."""
    optimum: float | None
    """The curve's minimum; None if it has none."""
    doubts: tuple[str, ...]
    """Empty if the optimum can be believed."""

    @property
    def is_illustrative(self) -> bool:
        return bool(self.doubts)


def judge_batches(
    points: Sequence[tuple[int, float]], *, curvature: float, optimum: float, r_squared: float, noise_sd: float | None
) -> BatchVerdict:
    """points: (global batch, mean loss). curvature: the curve's a. noise_sd: of a loss over seeds; None: unknown."""
    batches = [batch for batch, _ in points]
    losses = [loss for _, loss in points]
    best = min(points, key=lambda point: point[1])[0]
    doubts = []
    if len(set(batches)) < LEAST_POINTS:
        doubts.append(f"{len(set(batches))} batches are met by every parabola: run at least {LEAST_POINTS}")
    if curvature <= 0:
        doubts.append("the curve has no minimum")
    elif not min(batches) <= optimum <= max(batches):
        side = "smaller" if optimum < min(batches) else "larger"
        doubts.append(f"the optimum {optimum:,.1f} is outside of {min(batches)} to {max(batches)}: try {side} batches")
    if r_squared < GOOD_FIT:
        doubts.append(f"the curve explains {r_squared:.0%} of the losses' variance, less than {GOOD_FIT:.0%}")
    if noise_sd is None:
        doubts.append("one seed does not show the noise: --seeds 2 or more does")
    elif max(losses) - min(losses) < CLEAR_SDS * noise_sd:
        doubts.append(f"the batch changes the loss by {max(losses) - min(losses):.4f}, the seed by sd {noise_sd:.4f}")
    return BatchVerdict(best_measured=best, optimum=optimum if curvature > 0 else None, doubts=tuple(doubts))


def nearest_power_of_two(batch: float) -> int:
    """The power of two that is nearest by ratio."""
    size = 1
    while size * 2**0.5 < batch:
        size *= 2
    return size
