"""Ramps: HLAT's published values, every shape by hand, two units, and bounds for any numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.decay_shapes import OUR_SHAPES
from parallel3d.ramps import LrSchedule

HLAT = LrSchedule(
    peak=3e-4, kind="cosine", warmup=2000, decay_begin=2000, decay_end=500_000, min_ratio=0.1, decay_form="clamp"
)


@st.composite
def ramps(draw: st.DrawFn) -> LrSchedule:
    warmup = draw(st.integers(0, 50))
    decay_begin = warmup + draw(st.integers(0, 20))
    return LrSchedule(
        peak=draw(st.floats(1e-6, 1.0)),
        kind=draw(st.sampled_from(sorted(OUR_SHAPES))),
        warmup=warmup,
        decay_begin=decay_begin,
        decay_end=decay_begin + draw(st.integers(0, 50)),
        min_ratio=draw(st.floats(0.0, 1.0)),
        decay_form=draw(st.sampled_from(["floor", "clamp"])),
    )


def by_updates(lr_schedule: LrSchedule, *positions: float) -> list[float]:
    return [lr_schedule.at(updates=position, tokens=math.nan) for position in positions]


def test_hlat_values():
    expected = [0.0, 1.5e-4, 3e-4, 3e-5, 3e-5]
    assert by_updates(HLAT, 0, 1000, 2000, 397_994, 10**9) == pytest.approx(expected, rel=1e-12)
    assert by_updates(HLAT, 250_000) == pytest.approx([1.509e-4], rel=5e-4)  # published with four digits
    assert by_updates(HLAT, 397_993)[0] > 3e-5


def test_floor_form_by_hand():
    lr_schedule = LrSchedule(peak=2.0, kind="cosine", warmup=4, decay_begin=4, decay_end=12, min_ratio=0.1)
    at_three_quarters = 0.1 + 0.9 * 0.5 * (1 + math.cos(0.75 * math.pi))
    expected = {0: 0.0, 2: 1.0, 4: 2.0, 8: 1.1, 10: 2 * at_three_quarters, 12: 0.2, 99: 0.2}
    assert by_updates(lr_schedule, *expected) == pytest.approx(list(expected.values()))


def test_linear_forms_by_hand():
    floor = LrSchedule(peak=1.0, kind="linear", decay_end=10, min_ratio=0.5)
    clamp = replace(floor, decay_form="clamp")
    assert by_updates(floor, 0, 4, 10) == pytest.approx([1.0, 0.8, 0.5])
    assert by_updates(clamp, 0, 4, 6, 10) == pytest.approx([1.0, 0.6, 0.5, 0.5])


def test_warmup_stable_decay_by_hand():
    linear = LrSchedule(peak=2.0, kind="linear", warmup=10, decay_begin=80, decay_end=100)
    assert by_updates(linear, 5, 10, 45, 80, 90, 100, 101) == pytest.approx([1.0, 2.0, 2.0, 2.0, 1.0, 0.0, 0.0])
    root = replace(linear, kind="1-sqrt", min_ratio=0.1)
    assert by_updates(root, 80, 85, 100) == pytest.approx([2.0, 2 * (0.1 + 0.9 * 0.5), 0.2])


def test_constant_ignores_the_decay():
    lr_schedule = LrSchedule(peak=3.0, warmup=10, decay_end=20)
    assert by_updates(lr_schedule, 5, 10, 15, 1000) == [1.5, 3.0, 3.0, 3.0]


def test_warmup_by_updates_and_decay_by_tokens():
    lr_schedule = LrSchedule(peak=1.0, kind="linear", warmup=4, decay_begin=40, decay_end=140, decay_unit="tokens")
    assert lr_schedule.at(updates=2, tokens=3) == 0.5
    assert lr_schedule.at(updates=5, tokens=39) == 1.0
    assert lr_schedule.at(updates=5, tokens=90) == lr_schedule.at(updates=500, tokens=90) == 0.5
    assert lr_schedule.at(updates=1, tokens=90) == 0.25  # the lower counts


def test_warmup_by_tokens_and_decay_by_updates():
    lr_schedule = LrSchedule(peak=1.0, kind="linear", warmup=40, warmup_unit="tokens", decay_begin=4, decay_end=14)
    assert lr_schedule.at(updates=9, tokens=10) == 0.25
    assert lr_schedule.at(updates=9, tokens=30) == 0.5


@given(ramps())
def test_rises_over_the_warmup_then_never_rises_again(lr_schedule: LrSchedule):
    values = by_updates(lr_schedule, *range(lr_schedule.decay_end + 5))
    warmup, rest = values[: lr_schedule.warmup + 1], values[lr_schedule.warmup :]
    last = lr_schedule.peak * (1.0 if lr_schedule.kind == "constant" else lr_schedule.min_ratio)
    if lr_schedule.decay_end > lr_schedule.warmup:
        assert warmup == sorted(warmup)
        assert rest[0] == pytest.approx(lr_schedule.peak)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in zip(rest, rest[1:]))
    assert rest[-1] == pytest.approx(last)


@given(ramps(), st.integers(0, 150), st.integers(1, 1000))
def test_units_are_alike_where_a_step_has_always_as_many_tokens(
    lr_schedule: LrSchedule, updates: int, step_tokens: int
):
    by_tokens = replace(
        lr_schedule,
        warmup=lr_schedule.warmup * step_tokens,
        warmup_unit="tokens",
        decay_begin=lr_schedule.decay_begin * step_tokens,
        decay_end=lr_schedule.decay_end * step_tokens,
        decay_unit="tokens",
    )
    tokens = updates * step_tokens
    assert by_tokens.at(updates=0, tokens=tokens) == pytest.approx(lr_schedule.at(updates=updates, tokens=0))
