"""Exact scalars have the same bits in any order and partition, and the format of gradients fits all terms."""

from math import fsum, inf, isnan, ldexp, nan, nextafter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.precision.fixed_point import NUM_FLOATS, ExactSum, plan_fixed_point

LOSSES = st.floats(0.0, 1e9).filter(lambda x: x == 0 or x >= 2**-52)
ANY_UNITS = st.integers(-(2**250), 2**250)


def add_slots(vectors):
    """Adds as an all-reduce does, in the given order."""
    total = [0.0] * NUM_FLOATS
    for vector in vectors:
        total = [a + b for a, b in zip(total, vector)]
    return total


@given(st.lists(LOSSES, min_size=1, max_size=40), st.integers(1, 8), st.randoms(use_true_random=False))
def test_losses_add_to_the_nearest_float_in_any_partition(losses, num_ranks, random):
    random.shuffle(losses)
    owners = [random.randrange(num_ranks) for _ in losses]
    ranks = [ExactSum.of(x for x, o in zip(losses, owners) if o == rank) for rank in range(num_ranks)]
    assert ExactSum.from_floats(add_slots(r.to_floats() for r in ranks)).value == fsum(losses)


@given(st.lists(ANY_UNITS, min_size=1, max_size=12))
def test_slots_add_like_integers(numbers):
    total = ExactSum.from_floats(add_slots(ExactSum(units=n).to_floats() for n in numbers))
    assert total == ExactSum(units=sum(numbers))


@given(st.one_of(ANY_UNITS, st.sampled_from([2**255 - 1, -(2**255), 2**32 - 1, -1])))
def test_a_million_ranks_may_add(units):
    """Every digit times 2**20 is still an integer that float64 represents exactly."""
    assert all(slot == int(slot) and abs(slot) * 2**20 < 2**53 for slot in ExactSum(units=units).to_floats())


def test_a_sum_beyond_the_slots_is_an_error():
    with pytest.raises(AssertionError, match="does not fit"):
        ExactSum(units=2**256).to_floats()


def test_only_what_is_below_the_unit_is_rounded():
    last_bit = nextafter(2.0**-52, 1.0)
    assert ExactSum.of([-last_bit]).value == -last_bit
    assert [ExactSum.of([ldexp(x, -104)]).units for x in (0.4, 0.75, 1.0, -0.75)] == [0, 1, 1, -1]


def test_what_is_no_number_of_units_stays_itself():
    total = ExactSum.from_floats(add_slots([ExactSum.of([1.5, inf]).to_floats(), ExactSum.of([2.0]).to_floats()]))
    assert total.value == inf and total.units == 3.5 * 2**104
    assert isnan(ExactSum.of([1.0, nan]).value)
    assert ExactSum.of([2.0**100, -1.0]) == ExactSum(units=-(2**104), rest=2.0**100)


@given(st.integers(1, 2**40), st.integers(1, 2**20))
def test_no_sum_of_gradients_can_overflow(num_tokens, num_terms):
    """All terms at the limit, each rounded up by half a unit, still fit; so do their squares into a scalar's slots."""
    fixed = plan_fixed_point(num_tokens=num_tokens, num_terms=num_terms)
    worst = num_terms * (fixed.largest * 2.0**fixed.shift + 0.5)
    assert worst < 2**63
    assert fixed.shift <= 52
    num_elements = 2**40
    ExactSum(units=num_elements * int(worst) ** 2 << (104 - 2 * fixed.shift)).to_floats()


@given(st.integers(1, 2**40), st.integers(1, 2**10))
def test_the_mean_gradient_has_the_stated_range_and_resolution(num_tokens, num_terms):
    fixed = plan_fixed_point(num_tokens=num_tokens, num_terms=num_terms)
    assert fixed.largest >= 2**10 * (num_tokens / num_terms)  # the share of one term, at a mean of 1024
    assert num_terms * ldexp(0.5, -fixed.shift) / num_tokens <= num_terms * 2.0**-52
