"""Norms of weights and second moments follow their definitions; with exact sums any ranges give the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.optim import measure
from parallel3d.optim.state_norms import StateNorms, larger

NUM_ELEMENTS = 150_000  # more than two blocks


def measure_state(weights, second_moment, *, exact):
    if exact:
        return measure.measure_state_exactly(weights, second_moment)
    return measure.norms_of(measure.measure_state(weights, second_moment).tolist())


def state_of(number_format=torch.float32, seed=1):
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randn(NUM_ELEMENTS, generator=draw).to(number_format)
    return weights, (torch.randn(NUM_ELEMENTS, generator=draw) ** 4 * 1e-6).to(number_format)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("number_format", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norms_are_what_they_are_called(number_format, exact):
    """1e-5: sums of 2**16 elements in fp32."""
    weights, second_moment = state_of(number_format)
    found = measure_state(weights, second_moment, exact=exact)
    roots = second_moment.double().sqrt()
    assert found.squared_weights.value == pytest.approx(weights.double().square().sum().item(), rel=1e-5)
    assert found.variance.value == pytest.approx(roots.sum().item(), rel=1e-5)
    assert found.variance_max == pytest.approx(roots.max().item(), rel=1e-5)


@given(st.lists(st.integers(1, NUM_ELEMENTS - 1), max_size=6))
def test_exact_sums_are_the_same_on_every_cut(cuts):
    weights, second_moment = state_of(torch.float64)
    edges = [0, *sorted(set(cuts)), NUM_ELEMENTS]
    parts = [
        measure_state(weights[start:stop], second_moment[start:stop], exact=True)
        for start, stop in zip(edges, edges[1:])
    ]
    assert sum(parts, start=StateNorms()) == measure_state(weights, second_moment, exact=True)


def test_single_elements_of_any_size():
    """The smallest are rounded to 2**-60, the largest as in float64."""
    weights = torch.tensor([3.0, 1e-4, 1e-12, 2.0**25], dtype=torch.float64)
    found = measure_state(weights[:1], weights[:1] ** 2, exact=True)
    assert (found.squared_weights.value, found.variance.value, found.variance_max) == (9.0, 3.0, 3.0)
    assert measure_state(weights[1:2], weights[:1], exact=True).squared_weights.value == pytest.approx(1e-8, abs=2**-60)
    assert measure_state(weights[2:3], weights[:1], exact=True).squared_weights.value == 0.0
    assert measure_state(weights[:1], weights[3:] ** 2, exact=True).variance.value == 2.0**25


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_shows(bad, exact):
    weights, second_moment = state_of(torch.float64)
    weights[70_000] = second_moment[7] = bad
    found = measure_state(weights, second_moment, exact=exact)
    for value in (found.squared_weights.value, found.variance.value, found.variance_max):
        assert not math.isfinite(value)


def test_the_larger_of_two():
    assert larger(1.0, 2.0) == larger(2.0, 1.0) == 2.0
    assert math.isnan(larger(math.nan, 1.0)) and math.isnan(larger(1.0, math.nan))
