"""The search of the largest micro-batch: the right one, in few attempts."""

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.costs.batch_search import largest_divisor, largest_that_fits


@given(st.integers(1, 3000), st.integers(0, 4000))
def test_it_finds_the_largest_and_asks_for_no_size_twice(most, limit):
    asked = []

    def fits(size):
        assert 1 <= size <= most
        asked.append(size)
        return size <= limit

    found = largest_that_fits(fits, most)
    assert found == min(most, limit)
    assert len(asked) == len(set(asked)) <= 2 * log2(max(found, 1)) + 3


@pytest.mark.parametrize("limit, most_asked", [(0, 1), (1, 2), (13, 8), (64, 13), (69, 13), (70, 8)])
def test_the_blogs_range(limit, most_asked):
    """The blog bisects 1 to 70 in 8 attempts, once it knows that 70 fails."""
    asked = []
    assert largest_that_fits(lambda size: asked.append(size) or size <= limit, 70) == limit
    assert len(asked) <= most_asked


@given(st.integers(1, 500), st.integers(0, 600))
def test_the_largest_divisor(total, most):
    found = largest_divisor(total, most)
    assert (found == 0) == (most == 0)
    assert not found or (total % found == 0 and found <= most)
    assert not any(total % size == 0 for size in range(found + 1, min(total, most) + 1))
