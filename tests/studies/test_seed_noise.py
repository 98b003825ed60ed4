"""Spreads over seeds and paired comparisons: scipy's numbers, and sentences that say when a difference is noise."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from parallel3d.studies.seed_noise import (
    SeedSpread,
    compare_by_seed,
    describe_comparison,
    describe_spread,
    t_quantile,
)


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 100])
def test_quantiles_are_scipys(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)
    assert t_quantile(freedom, 0.99) == pytest.approx(stats.t.ppf(0.995, freedom), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_a_comparison_is_scipys_paired_test(seed: int) -> None:
    draw = random.Random(seed)
    base = {n: draw.gauss(3.0, 0.1) for n in range(2 + seed)}
    candidate = {n: loss + draw.gauss(-0.02, 0.02) for n, loss in base.items()} | {99: 0.0}
    found = compare_by_seed(base, candidate)
    assert found is not None and found.seeds == tuple(range(2 + seed))  # 99 has no partner
    pairs = [candidate[n] for n in base], list(base.values())
    expected = stats.ttest_rel(*pairs)
    assert (found.t, found.p) == pytest.approx((expected.statistic, expected.pvalue), rel=1e-9)
    low, high = expected.confidence_interval(0.95)
    assert found.spread.half_width == pytest.approx((high - low) / 2, rel=1e-9)
    variances = [stats.tvar(side) for side in pairs]
    assert found.noise_sd == pytest.approx((sum(variances) / 2) ** 0.5)
    assert found.num_sds == pytest.approx(abs(found.spread.mean) / found.noise_sd)


def test_a_spread() -> None:
    spread = SeedSpread.of([1.0, 2.0, 3.0])
    assert (spread.mean, spread.sd, spread.half_width) == pytest.approx((2.0, 1.0, 4.302653 / 3**0.5))
    assert describe_spread(spread) == "2.0000, sd 1.0000 over 3 seeds, 95 % interval of the mean -0.4841 to 4.4841"
    assert "noise is unknown" in describe_spread(SeedSpread.of([1.0]))
    with pytest.raises(ValueError):
        SeedSpread.of([])


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        (
            [-0.5, -0.51, -0.49],
            "new is better than old by 0.5000 nats a token, beyond noise (4.87 sd of the seeds, p =",
        ),
        ([0.5, 0.51, 0.49], "new is worse than old by 0.5000 nats a token, beyond noise"),
        ([-0.5, 0.4, 0.05], "within noise: new differs from old by -0.0167 nats a token"),
        ([0.0, 0.0, 0.0], "within noise: new differs from old by +0.0000"),
        ([0.25, 0.25, 0.25], "new is worse than old by 0.2500 nats a token, beyond noise"),
        ([0.5], "with one seed: give more to learn what noise is"),
        ([], "no seed is in both"),
    ],
)
def test_the_verdict_says_whether_it_is_noise(differences: list[float], said: str) -> None:
    base = {1: 2.0, 2: 2.1, 3: 2.2}
    candidate = {seed: base[seed] + each for seed, each in zip(base, differences)}
    assert said in describe_comparison(compare_by_seed(base, candidate), "new", "old")


def test_only_seeds_that_both_have_are_compared() -> None:
    found = compare_by_seed({1: 2.0, 2: 9.0, 3: 2.2, 4: 2.4}, {1: 2.1, 3: 2.4, 5: 0.0})
    assert found is not None and found.seeds == (1, 3) and found.differences == pytest.approx((0.1, 0.2))
