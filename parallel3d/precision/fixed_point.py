"""Numbers that add up to the same bits in any order: integers in a fixed unit. Pure.

Scalars (losses, squared norms) are Python integers in units of 2**-104. They travel in a float64 vector that is summed
over the ranks, as digits of 32 bits: float64 adds integers below 2**53 without error, so up to 2**20 ranks may add. A
float64 of at least 2**-52 is a multiple of the unit: losses are not even rounded.

Gradients are int64 (`exact_sums.py`), in a unit that `plan_fixed_point` chooses for the batch. The gradient of the mean
loss is a sum over T target tokens, divided by T; an element of it beyond +-1024 means that the run has exploded. With
T <= 2**k the sums therefore stay below 2**(10 + k), which is made 2**62 units::

    shift = 62 - 10 - k        unit of the sum: 2**-shift        unit of the mean gradient: less than 2**-51

Each of the N terms (one for each micro-batch, and for each tensor-parallel rank where these hold partial sums) is
rounded to the nearest unit and held to 1/N of the range. So no sum can overflow, and the mean gradient is wrong by at
most N x 2**-52: with eight micro-batches 1.8e-15. float64's own rounding at 1 is 2**-53, float32's 2**-24.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ldexp

LARGEST_GRADIENT_LOG2 = 10
"""Elements of the gradient of the mean loss may be as large as 2**10."""

UNIT_LOG2 = -104
"""Scalars count units of 2**-104: squares of gradients, whose own unit is never below 2**-52, need no rounding."""

NUM_FLOATS = 9
"""float64 slots of one scalar: eight digits, and one for values that are not a number of units."""

_DIGIT_BITS = 32
_NUM_DIGITS = NUM_FLOATS - 1
_LARGEST = 2.0**100


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """Units of 2**-shift, in which every term of a sum stays within +-largest (in the terms' own unit)."""

    shift: int
    largest: float


def plan_fixed_point(*, num_tokens: int, num_terms: int) -> FixedPoint:
    """The format for gradients that are sums over at most `num_tokens` tokens, made of at most `num_terms` terms."""
    range_log2 = LARGEST_GRADIENT_LOG2 + (num_tokens - 1).bit_length()
    return FixedPoint(shift=62 - range_log2, largest=2.0**range_log2 / num_terms)


@dataclass(frozen=True, kw_only=True)
class ExactSum:
    """A scalar that adds exactly: `units` of 2**-104, and `rest` for other values (infinity, NaN, from 2**100 on)."""

    units: int = 0
    rest: float = 0.0

    @staticmethod
    def of(values: Iterable[float]) -> ExactSum:
        """The sum of `values`; each is rounded to the nearest unit, which changes nothing from 2**-52 on."""
        units, rest = 0, 0.0
        for value in values:
            if abs(value) < _LARGEST:
                units += round(ldexp(value, -UNIT_LOG2))
            else:
                rest += value
        return ExactSum(units=units, rest=rest)

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(units=self.units + other.units, rest=self.rest + other.rest)

    @property
    def value(self) -> float:
        """The float64 nearest to the sum."""
        return self.rest + self.units / 2**-UNIT_LOG2

    def to_floats(self) -> list[float]:
        """Returns NUM_FLOATS numbers to which those of other sums, of up to 2**20 ranks, may be added without error."""
        digits, above = [], self.units
        for _ in range(_NUM_DIGITS - 1):
            digits.append(float(above & (2**_DIGIT_BITS - 1)))
            above >>= _DIGIT_BITS
        assert abs(above) <= 2 ** (_DIGIT_BITS - 1), f"a sum of {self.value:g} does not fit into its slots"
        return [*digits, float(above), self.rest]

    @staticmethod
    def from_floats(slots: Sequence[float]) -> ExactSum:
        """The sum of all the sums whose slots were added up in `slots`."""
        *digits, rest = slots
        assert len(digits) == _NUM_DIGITS, slots
        return ExactSum(units=sum(int(digit) << (_DIGIT_BITS * i) for i, digit in enumerate(digits)), rest=rest)
