"""Pearson's correlation coefficient and its two-sided p-value. Pure; tests compare it with scipy.

r = cov(x, y) / (sd(x) sd(y)) of n pairs. Without correlation, t = r sqrt((n - 2) / (1 - r^2)) follows Student's
distribution with n - 2 degrees of freedom, so that

    p = I_z((n - 2) / 2, 1/2),    z = (n - 2) / (n - 2 + t^2) = 1 - r^2

is the probability of a t at least that far from 0 on either side. I is the regularised incomplete beta function,
computed by its continued fraction (Abramowitz and Stegun, 26.5.8) with Lentz's method; where that converges slowly, by
I_z(a, b) = 1 - I_{1-z}(b, a). p may underflow to 0.0, as in Table 3 of "Sequence Length Warmup".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import copysign, exp, fsum, inf, isfinite, lgamma, log, log1p, sqrt

_TINY = 1e-300
_CONVERGED = 1e-15
_MAX_TERMS = 10_000


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """r in [-1, 1] of `num_pairs` pairs, its t, and the two-sided p."""

    r: float
    num_pairs: int
    t: float
    p: float


def correlate(x: Sequence[float], y: Sequence[float]) -> Correlation | None:
    """The correlation of the finite pairs; None for fewer than three, or if one series is constant."""
    assert len(x) == len(y), f"{len(x)} values against {len(y)}"
    pairs = [(a, b) for a, b in zip(x, y) if isfinite(a) and isfinite(b)]
    if len(pairs) < 3:
        return None
    scales = [max(abs(pair[side]) for pair in pairs) or 1.0 for side in (0, 1)]  # no square over- or underflows
    columns = [[pair[side] / scales[side] for pair in pairs] for side in (0, 1)]
    means = [fsum(column) / len(pairs) for column in columns]
    dx, dy = ([value - mean for value in column] for column, mean in zip(columns, means))
    size = sqrt(fsum(a * a for a in dx)) * sqrt(fsum(b * b for b in dy))
    if size == 0.0:
        return None
    r = max(-1.0, min(1.0, fsum(a * b for a, b in zip(dx, dy)) / size))
    return significance(r, len(pairs))


def significance(r: float, num_pairs: int) -> Correlation:
    """t and p of a coefficient r from `num_pairs` >= 3 pairs."""
    freedom, rest = num_pairs - 2, (1.0 - r) * (1.0 + r)
    if rest == 0.0:
        return Correlation(r=r, num_pairs=num_pairs, t=copysign(inf, r), p=0.0)
    t = r * sqrt(freedom / rest)
    return Correlation(r=r, num_pairs=num_pairs, t=t, p=incomplete_beta(freedom / 2, 0.5, rest))


def incomplete_beta(a: float, b: float, z: float) -> float:
    """I_z(a, b) for a, b > 0 and z in [0, 1]."""
    if z <= 0.0 or z >= 1.0:
        return float(z >= 1.0)
    if z > (a + 1.0) / (a + b + 2.0):
        return 1.0 - incomplete_beta(b, a, 1.0 - z)
    front = lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(z) + b * log1p(-z)
    return exp(front) / (a * _continued_fraction(a, b, z))


def _continued_fraction(a: float, b: float, z: float) -> float:
    """1 + d1 / (1 + d2 / (1 + ...)), whose inverse belongs to the incomplete beta function."""
    value = numerator_ratio = 1.0  # Lentz: the quotients of successive numerators, and of denominators
    denominator_ratio = 0.0
    for number in range(1, _MAX_TERMS):
        m, is_odd = divmod(number, 2)
        if is_odd:
            d = -(a + m) * (a + b + m) * z / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * z / ((a + 2 * m - 1) * (a + 2 * m))
        denominator_ratio = 1.0 / _away_from_zero(1.0 + d * denominator_ratio)
        numerator_ratio = _away_from_zero(1.0 + d / numerator_ratio)
        value *= numerator_ratio * denominator_ratio
        if abs(numerator_ratio * denominator_ratio - 1.0) < _CONVERGED:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
