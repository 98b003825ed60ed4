"""Pearson's r and its p against published values, closed forms, and what p means."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.monitor.correlation import correlate, incomplete_beta, significance


@pytest.mark.parametrize("r, t", [(0.23, 45.8), (0.26, 52.1)])
def test_the_papers_table_3(r, t):
    found = significance(r, 37_500)
    assert round(found.t, 1) == t and found.p == 0.0


@pytest.mark.parametrize("r", [0.0, 0.05, -0.3, 0.7, 0.999, -0.999999])
def test_p_with_two_and_four_degrees_of_freedom(r):
    """Student's distribution has closed forms there: p = 1 - |r|, and 1 - |r| (3 - r^2) / 2."""
    assert significance(r, 4).p == pytest.approx(1 - abs(r), rel=1e-10)
    assert significance(r, 6).p == pytest.approx(1 - abs(r) * (3 - r * r) / 2, rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("r", [0.1, -0.5, 0.9])
def test_p_with_one_degree_of_freedom(r):
    """Cauchy's distribution."""
    assert significance(r, 3).p == pytest.approx(1 - 2 * math.asin(abs(r)) / math.pi, rel=1e-12)


@given(st.floats(0.5, 200.0), st.floats(0.5, 200.0), st.floats(0.001, 0.999))
def test_the_incomplete_beta_function_is_its_own_mirror(a, b, z):
    assert incomplete_beta(a, b, z) + incomplete_beta(b, a, 1 - z) == pytest.approx(1.0, abs=1e-9)


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.01, 0.99))
def test_the_incomplete_beta_function_of_integers_is_a_binomial_sum(a, b, z):
    n = a + b - 1
    tail = math.fsum(math.comb(n, k) * z**k * (1 - z) ** (n - k) for k in range(a, n + 1))
    assert incomplete_beta(a, b, z) == pytest.approx(tail, rel=1e-9, abs=1e-14)


def test_r_is_the_standard_librarys():
    draw = random.Random(3)
    x = [draw.gauss(0, 1) for _ in range(500)]
    y = [a + draw.gauss(0, 3) for a in x]
    found = correlate(x, y)
    assert found.r == pytest.approx(statistics.correlation(x, y), rel=1e-12)
    assert found.num_pairs == 500 and 0 < found.p < 1e-6


def test_p_is_the_share_of_shuffled_series_that_correlate_as_much():
    """What p means, by experiment: 2000 shuffles, standard error 0.01."""
    draw = random.Random(5)
    x = [draw.gauss(0, 1) for _ in range(30)]
    y = [0.25 * a + draw.gauss(0, 1) for a in x]
    found = correlate(x, y)
    shuffled = list(y)
    as_much = 0
    for _ in range(2000):
        draw.shuffle(shuffled)
        as_much += abs(statistics.correlation(x, shuffled)) >= abs(found.r)
    assert 0.02 < found.p < 0.98 and as_much / 2000 == pytest.approx(found.p, abs=0.04)


def test_what_has_no_correlation():
    assert correlate([1.0, 2.0], [3.0, 4.0]) is None
    assert correlate([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
    assert correlate([1.0, math.nan, 2.0, math.inf], [1.0, 2.0, 2.0, 3.0]) is None
    perfect = correlate([1.0, 2.0, 3.0], [1e200, 2e200, 3e200])
    assert perfect.r == pytest.approx(1.0) and perfect.p < 1e-7


@pytest.mark.parametrize("num_pairs, slope", [(3, 0.5), (10, 0.0), (30, 0.3), (500, 0.1), (2000, 1.0)])
def test_r_and_p_are_scipys(num_pairs, slope):
    """1e-9 of p: both evaluate the incomplete beta function in fp64, scipy by Boost; a p of 1e-200 included."""
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(num_pairs)
    x = [draw.gauss(0, 1) for _ in range(num_pairs)]
    y = [slope * a + draw.gauss(0, 1) for a in x]
    ours, theirs = correlate(x, y), stats.pearsonr(x, y)
    assert ours.r == pytest.approx(theirs.statistic, rel=1e-12, abs=1e-15)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-9)
