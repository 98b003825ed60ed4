"""Statistics of runs that differ in their seeds: mean, spread, interval, and paired comparisons. Pure.

A seed decides initial weights, the order of the text and all noise, so that losses of one configuration scatter over
seeds. Two configurations with the same seed share that scatter in part: their difference, seed by seed, is smaller than
the scatter. With n differences of mean d and standard deviation s, t = d / (s / sqrt(n)) follows Student's distribution
with n - 1 degrees of freedom if both configurations are equally good. Tests compare with scipy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import copysign, fsum, inf, sqrt

from parallel3d.monitor.correlation import incomplete_beta

CONFIDENCE = 0.95
SIGNIFICANT_P = 1 - CONFIDENCE
"""Differences with a smaller p are beyond noise."""
_MAX_HALVINGS = 200


@dataclass(frozen=True, kw_only=True)
class SeedSpread:
    """Losses of one configuration over seeds."""

    num_seeds: int
    mean: float
    sd: float | None
    """Sample standard deviation; None for one seed."""
    half_width: float | None
    """The mean's 95 % interval reaches this far to either side; None for one seed."""

    @staticmethod
    def of(losses: Sequence[float]) -> SeedSpread:
        """Raises ValueError without losses."""
        if not losses:
            raise ValueError("no losses")
        count, mean = len(losses), fsum(losses) / len(losses)
        if count == 1:
            return SeedSpread(num_seeds=1, mean=mean, sd=None, half_width=None)
        sd = sqrt(fsum((loss - mean) ** 2 for loss in losses) / (count - 1))
        return SeedSpread(num_seeds=count, mean=mean, sd=sd, half_width=t_quantile(count - 1) * sd / sqrt(count))


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """A candidate against a base, by the seeds that both have."""

    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    """Candidate - base, in the order of the seeds."""
    spread: SeedSpread
    """Of the differences."""
    noise_sd: float | None
    """Standard deviation of one configuration over these seeds, pooled from both; None for one seed."""
    t: float | None
    p: float | None
    """Two-sided; None for one seed."""

    @property
    def num_sds(self) -> float | None:
        """The mean difference in standard deviations of the seeds; None if unknown."""
        if self.noise_sd is None:
            return None
        return abs(self.spread.mean) / self.noise_sd if self.noise_sd else (inf if self.spread.mean else 0.0)

    @property
    def is_beyond_noise(self) -> bool:
        return self.p is not None and self.p < SIGNIFICANT_P


def compare_by_seed(base: Mapping[int, float], candidate: Mapping[int, float]) -> PairedComparison | None:
    """Compares losses by seed; None if no seed is in both."""
    seeds = tuple(sorted(base.keys() & candidate.keys()))
    if not seeds:
        return None
    differences = tuple(candidate[seed] - base[seed] for seed in seeds)
    spread = SeedSpread.of(differences)
    sds = [SeedSpread.of([losses[seed] for seed in seeds]).sd for losses in (base, candidate)]
    t, p = _test_mean(spread)
    noise = None if None in sds else sqrt(fsum((sd or 0.0) ** 2 for sd in sds) / 2)
    return PairedComparison(seeds=seeds, differences=differences, spread=spread, noise_sd=noise, t=t, p=p)


def _test_mean(spread: SeedSpread) -> tuple[float | None, float | None]:
    """t and two-sided p of a mean that might be 0."""
    if spread.sd is None:
        return None, None
    if spread.sd == 0.0:
        return (copysign(inf, spread.mean), 0.0) if spread.mean else (0.0, 1.0)
    t = spread.mean / (spread.sd / sqrt(spread.num_seeds))
    return t, two_sided_p(t, spread.num_seeds - 1)


def two_sided_p(t: float, freedom: int) -> float:
    """The probability of a t at least that far from 0, with `freedom` degrees of freedom."""
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t that is exceeded, on either side, with probability 1 - confidence; by bisection."""
    low, high = 0.0, 1.0
    while two_sided_p(high, freedom) > 1 - confidence:
        high *= 2
    for _ in range(_MAX_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if two_sided_p(middle, freedom) > 1 - confidence else (low, middle)
    return high


def describe_spread(spread: SeedSpread) -> str:
    """One line, in nats a token."""
    if spread.sd is None or spread.half_width is None:
        return f"{spread.mean:.4f} (one seed: its noise is unknown)"
    low, high = spread.mean - spread.half_width, spread.mean + spread.half_width
    return (
        f"{spread.mean:.4f}, sd {spread.sd:.4f} over {spread.num_seeds} seeds, "
        f"95 % interval of the mean {low:.4f} to {high:.4f}"
    )


def describe_comparison(found: PairedComparison | None, candidate: str, base: str) -> str:
    """The verdict in one sentence; lower losses are better."""
    if found is None:
        return f"{candidate} against {base}: no seed is in both, so they can't be compared: use the same seeds"
    mean = found.spread.mean
    size = f"{abs(mean):.4f} nats a token"
    if found.p is None:
        return f"{candidate} is {size} {_direction(mean)} than {base} with one seed: give more to learn what noise is"
    facts = f"{found.num_sds:.2f} sd of the seeds, p = {found.p:.2g}, {len(found.seeds)} pairs"
    if not found.is_beyond_noise:
        return f"within noise: {candidate} differs from {base} by {mean:+.4f} nats a token ({facts})"
    return f"{candidate} is {_direction(mean)} than {base} by {size}, beyond noise ({facts})"


def _direction(difference: float) -> str:
    return "better" if difference < 0 else "worse"
