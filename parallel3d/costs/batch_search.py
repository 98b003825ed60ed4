"""The search of the largest micro-batch: by doubling, then by bisection. Pure.

Source: the blog on GPT-2 163M, which bisects between 1 and a bound that must fail; a bound that grows needs no guess.
"""

from __future__ import annotations

from collections.abc import Callable


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """Returns the largest of 1 to `most` for which `fits` is true; 0 if it is false for 1.

    `fits` is asked at most once for each size: log2 of the answer times until one fails or `most` is reached, and as
    often again between the last two.
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    if high > most:
        if low == most or fits(most):
            return most
        high = most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_divisor(total: int, most: int) -> int:
    """The largest divisor of `total` that is at most `most`; 0 if `most` is 0."""
    return max((size for size in range(1, min(total, most) + 1) if total % size == 0), default=0)
