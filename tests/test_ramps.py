"""Ramps: HLAT's published values, both decay forms, and bounds for any numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.ramps import SHAPES, Ramp

HLAT = Ramp(peak=3e-4, kind="cosine", warmup=2000, decay_end=500_000, min_ratio=0.1, form="clamp")


@st.composite
def ramps(draw: st.DrawFn) -> Ramp:
    warmup = draw(st.integers(0, 50))
    return Ramp(
        peak=draw(st.floats(1e-6, 1.0)),
        kind=draw(st.sampled_from(sorted(SHAPES))),
        warmup=warmup,
        decay_end=warmup + draw(st.integers(0, 50)),
        min_ratio=draw(st.floats(0.0, 1.0)),
        form=draw(st.sampled_from(["floor", "clamp"])),
    )


def test_hlat_values():
    assert HLAT.at(0) == 0.0
    assert HLAT.at(1000) == pytest.approx(1.5e-4, rel=1e-12)
    assert HLAT.at(2000) == pytest.approx(3e-4, rel=1e-12)
    assert HLAT.at(250_000) == pytest.approx(1.509e-4, rel=5e-4)  # published with four digits
    assert HLAT.at(397_993) > 3e-5
    assert HLAT.at(397_994) == pytest.approx(3e-5, rel=1e-12)
    assert HLAT.at(10**9) == pytest.approx(3e-5, rel=1e-12)


def test_floor_form_by_hand():
    ramp = Ramp(peak=2.0, kind="cosine", warmup=4, decay_end=12, min_ratio=0.1)
    at_three_quarters = 0.1 + 0.9 * 0.5 * (1 + math.cos(0.75 * math.pi))
    expected = {0: 0.0, 2: 1.0, 4: 2.0, 8: 1.1, 10: 2 * at_three_quarters, 12: 0.2, 99: 0.2}
    assert {at: ramp.at(at) for at in expected} == pytest.approx(expected)


def test_linear_forms_by_hand():
    floor = Ramp(peak=1.0, kind="linear", decay_end=10, min_ratio=0.5)
    clamp = Ramp(peak=1.0, kind="linear", decay_end=10, min_ratio=0.5, form="clamp")
    assert [floor.at(at) for at in (0, 4, 10)] == pytest.approx([1.0, 0.8, 0.5])
    assert [clamp.at(at) for at in (0, 4, 6, 10)] == pytest.approx([1.0, 0.6, 0.5, 0.5])


def test_constant_ignores_the_decay():
    ramp = Ramp(peak=3.0, warmup=10, decay_end=20)
    assert [ramp.at(at) for at in (5, 10, 15, 1000)] == [1.5, 3.0, 3.0, 3.0]


@given(ramps())
def test_rises_over_the_warmup_then_never_rises_again(ramp: Ramp):
    values = [ramp.at(at) for at in range(ramp.decay_end + 5)]
    warmup, rest = values[: ramp.warmup + 1], values[ramp.warmup :]
    last = ramp.peak * (1.0 if ramp.kind == "constant" else ramp.min_ratio)
    if ramp.decay_end > ramp.warmup:
        assert warmup == sorted(warmup)
        assert rest[0] == pytest.approx(ramp.peak)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in zip(rest, rest[1:]))
    assert rest[-1] == pytest.approx(last)
