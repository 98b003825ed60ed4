"""The search for a warmup on made-up runs: it finds the threshold, with as few runs as halving needs."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.monitor.tuning import SearchSpace, ShortRunEvaluation, first_fluctuation, search_warmup

CALM = [ShortRunEvaluation(step=step, loss=6.0 - step / 10) for step in range(1, 6)]
WILD = [*CALM, ShortRunEvaluation(step=6, loss=5.5 + 0.27)]
LOST = [*CALM, ShortRunEvaluation(step=6, loss=None)]


def search_of(num_starts: int, num_durations: int) -> SearchSpace:
    return SearchSpace(
        starts=[8 * 2**number for number in range(num_starts)],
        durations=[100 * number for number in range(1, num_durations + 1)],
        start_run_steps=50,
        duration_run_steps=150,
    )


def test_a_fluctuation_is_beyond_the_best_one_so_far():
    """exp(0.26) = 1.297, exp(0.27) = 1.310."""
    losses = [4.0, 3.0, 3.26, 3.1, 2.9, 3.17, 9.0]
    found = first_fluctuation([ShortRunEvaluation(step=10 * n, loss=loss) for n, loss in enumerate(losses)], 1.3)
    assert found is not None
    assert (found.step, found.ratio) == (50, pytest.approx(1.31, abs=1e-3))
    assert "1.31 x the best" in str(found)


def test_calm_rising_within_tolerance_and_lost_runs():
    assert first_fluctuation(CALM, 1.3) is None
    assert first_fluctuation([], 1.3) is None
    assert first_fluctuation(WILD, 1.3) is not None
    assert first_fluctuation(WILD, 1.4) is None
    found = first_fluctuation(LOST, 1.3)
    assert found is not None and found.step == 6 and "not finite" in str(found)


@given(st.integers(1, 6), st.integers(1, 200), st.data())
def test_finds_a_known_threshold_with_few_runs(num_starts: int, num_durations: int, data: st.DataObject):
    search = search_of(num_starts, num_durations)
    first_calm = data.draw(st.integers(0, num_starts - 1))
    longest = data.draw(st.integers(1, num_durations))
    probes = []

    def run(short_run):
        probes.append(short_run)
        if short_run.num_steps == search.start_run_steps:
            return CALM if short_run.start >= search.starts[first_calm] else WILD
        assert short_run.start == search.starts[first_calm]
        return CALM if short_run.duration <= search.durations[longest - 1] else LOST

    result = search_warmup(search, run)
    assert (result.start, result.duration) == (search.starts[first_calm], search.durations[longest - 1])
    assert len(probes) <= first_calm + 1 + ceil(log2(num_durations + 1)) <= search.max_short_runs
    assert len(set(probes)) == len(probes)


def test_says_when_nothing_is_calm():
    search = search_of(3, 8)
    assert search_warmup(search, lambda short_run: WILD).start is None
    beginning_alone = search_warmup(
        search, lambda short_run: CALM if short_run.num_steps == search.start_run_steps else WILD
    )
    assert (beginning_alone.start, beginning_alone.duration) == (8, None)
    assert "shortest" in beginning_alone.reason
