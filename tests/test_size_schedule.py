"""Paces: DeepSpeed's curriculum at every step, edges, and the rule of ours that follows evaluations."""

from __future__ import annotations

import json
from math import floor, inf, log, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.errors import UserError
from parallel3d.size_schedule import (
    Adaptive,
    BatchShapeSchedule,
    Constant,
    Custom,
    Discrete,
    Periodic,
    Polynomial,
    VarianceDriven,
    compute_run_length,
)


def deepspeed(step, total, low, high, multiple, degree=1):
    """DeepSpeed's fixed_root_get_difficulty, as published (fixed_linear: degree 1)."""
    difficulty = (float(step) / total) ** (1.0 / degree)
    difficulty = floor(difficulty * (high - low) + low)
    difficulty -= difficulty % multiple
    return min(difficulty, high)


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("low, high, total", [(8, 1024, 20_000), (64, 1024, 7_919), (64, 2048, 25_000)])
def test_growth_equals_deepspeed_at_every_step(low, high, total, degree):
    size_schedule = Polynomial(first=low, last=high, duration=total, multiple=8, exponent=1.0 / degree)
    assert [size_schedule.at(t) for t in range(1, 25_001)] == [
        deepspeed(t, total, low, high, 8, degree) for t in range(1, 25_001)
    ]


def test_deepspeeds_own_tables():
    """The truths of its unit tests, for steps 1, 2, ..."""
    linear = Polynomial(first=2, last=10, duration=8, multiple=2)
    assert [linear.at(t) for t in range(1, 11)] == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]
    discrete = Discrete(sizes=(1, 2, 3, 4, 5), until=(2, 4, 6, 8))
    assert [discrete.at(t) for t in range(1, 11)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_the_root_grows_fast_at_first():
    root = Polynomial(first=8, last=1024, duration=100, multiple=8, exponent=1 / 2)
    assert {t: root.at(t) for t in (1, 4, 25, 50, 100, 101)} == {1: 104, 4: 208, 25: 512, 50: 720, 100: 1024, 101: 1024}


def test_the_probe_of_figure_2_switches_every_1000_steps():
    """900 steps of 128, 100 of 1,024, again and again: the first long step is 901, the next short one 1,001."""
    probe = Periodic(sizes=(128, 1024), until=(900, 1000))
    lengths = [probe.at(t) for t in range(1, 3001)]
    switches = [t for t in range(2, 3001) if lengths[t - 1] != lengths[t - 2]]
    assert switches == [901, 1001, 1901, 2001, 2901]
    assert lengths.count(1024) == 300


growths = st.builds(
    lambda first, more, duration, multiple, exponent: Polynomial(
        first=first * multiple, last=(first + more) * multiple, duration=duration, multiple=multiple, exponent=exponent
    ),
    *(st.integers(1, 40), st.integers(0, 200), st.integers(1, 10**12), st.integers(1, 24), st.floats(0.1, 3)),
)


@given(growths, st.integers(1, 2 * 10**12), st.integers(0, 10**12))
def test_growth_rises_in_steps_to_its_end_and_stays(size_schedule, position, further):
    here, there = size_schedule.at(position), size_schedule.at(position + further)
    assert size_schedule.first <= here <= there <= size_schedule.last and here % size_schedule.multiple == 0
    assert (
        size_schedule.at(size_schedule.duration)
        == size_schedule.at(size_schedule.duration + further)
        == size_schedule.last
    )
    if len(size_schedule.values()) < 100:
        assert here in size_schedule.values()


def test_what_a_function_gives_is_checked():
    size_schedule = Custom(function=lambda t: 8 * t, name="mine:lengths", last=32, multiple=8)
    assert [size_schedule.at(t) for t in range(1, 5)] == [8, 16, 24, 32]
    with pytest.raises(UserError, match="'mine:lengths': returned 40 at 5: .* multiple of 8 from 8 to 32"):
        size_schedule.at(5)
    for wrong in (0, -8, 12, 8.0, None, True):
        with pytest.raises(UserError, match="multiple of 8"):
            Custom(function=lambda t, value=wrong: value, name="mine:lengths", last=32, multiple=8).at(1)


# --- by the variance --------------------------------------------------------------------------------------------------


def by_variance(**changes):
    return VarianceDriven(**(dict(first=8, last=24, multiple=8, interval=3, value=8) | changes))


def lengths_after(schedule, values):
    found = []
    for value in values:
        schedule = schedule.after_step(value)
        found.append(schedule.value)
    return found


def test_a_length_grows_after_calm_steps_and_shrinks_after_a_jump_of_the_variance():
    assert lengths_after(by_variance(), [1.0] * 10) == [8, 8, 16, 16, 16, 24, 24, 24, 24, 24]
    assert lengths_after(by_variance(), [1.0] * 4 + [1.31] + [1.0] * 3) == [8, 8, 16, 16, 8, 8, 8, 16]
    assert lengths_after(by_variance(), [1.0] * 4 + [1.3] + [1.0] * 3) == [8, 8, 16, 16, 16, 24, 24, 24]
    assert lengths_after(by_variance(shrinks=False), [1.0] * 4 + [9.0] * 2 + [1.0]) == [8, 8, 16, 16, 16, 16, 16]
    assert lengths_after(by_variance(), [1.0, 9.0, 9.0]) == [8, 8, 8]
    assert lengths_after(by_variance(value=16), [1.0, nan, inf, 1.0, 1.0, 1.0]) == [16, 8, 8, 8, 8, 16]


def test_values_before_the_interval_are_forgotten():
    """1.6 is a jump after 1, 1, 1; not after 1.25, 1.25, 1.25."""
    rising = [1.0, 1.0, 1.0, 1.25, 1.25, 1.25, 1.6]
    assert by_variance(value=24).after_step(1.0).recent == (1.0,)
    assert lengths_after(by_variance(value=24), rising)[-1] == 24
    assert lengths_after(by_variance(value=24), [*rising[:3], 1.6])[-1] == 16


def test_a_state_by_the_variance_is_resumed():
    fresh = BatchShapeSchedule(length=by_variance())
    values = [1.0, 1.1, 1.0, 1.05, 2.0, 1.0, 1.0]
    whole = fresh
    for cut in range(len(values)):
        resumed = fresh.resumed(json.loads(json.dumps(whole.to_json())))
        assert resumed == whole
        whole = whole.after_step(values[cut])
    assert fresh.after_step(None) == fresh
    other = fresh.resumed(BatchShapeSchedule(length=adaptive(last=64, value=56)).to_json())
    assert (other.length.value, other.length.recent) == (24, ())
    assert BatchShapeSchedule(length=adaptive()).resumed(whole.to_json()).length.best_loss == inf


# --- adaptive ---------------------------------------------------------------------------------------------------------


def adaptive(**changes):
    return Adaptive(**{**dict(first=8, last=32, multiple=8, value=8), **changes})


def follow(size_schedule, losses):
    lengths = []
    for loss in losses:
        size_schedule = size_schedule.after_evaluation(loss)
        lengths.append(size_schedule.at(1))
    return lengths


def test_an_adaptive_length_grows_while_the_perplexity_stays_near_its_best():
    near, far = log(1.3) - 1e-9, log(1.3) + 1e-9
    assert follow(adaptive(), [5.0, 4.0, 4.0 + near, 3.9]) == [16, 24, 32, 32]
    assert follow(adaptive(), [5.0, 4.0, 4.0 + far, 4.0]) == [16, 24, 16, 24]
    assert follow(adaptive(shrinks=False), [5.0, 4.0, 4.0 + far, 4.0]) == [16, 24, 24, 32]
    assert follow(adaptive(), [5.0, nan, inf, 5.0]) == [16, 8, 8, 16]
    assert follow(adaptive(), [inf, inf]) == [8, 8]


@given(st.lists(st.floats(allow_nan=True) | st.none(), max_size=30), st.integers(0, 30))
def test_what_evaluations_have_made_of_a_length_survives_a_checkpoint(losses, cut):
    fresh = BatchShapeSchedule(length=adaptive())
    whole = fresh
    for loss in losses:
        whole = whole.after_evaluation(loss)
    again = fresh
    for loss in losses[:cut]:
        again = again.after_evaluation(loss)
    again = fresh.resumed(json.loads(json.dumps(again.to_json())))
    for loss in losses[cut:]:
        again = again.after_evaluation(loss)
    assert again == whole


def test_a_length_that_goes_on_under_another_range_stays_in_it():
    old = BatchShapeSchedule(length=adaptive(last=64, value=56)).to_json()
    assert BatchShapeSchedule(length=adaptive()).resumed(old).shape(0, 0).sequence_length == 32
    assert BatchShapeSchedule(length=adaptive(first=16, last=64, multiple=16, value=16)).resumed(old).length.value == 48
    assert BatchShapeSchedule(length=Constant(64)).resumed(old) == BatchShapeSchedule(length=Constant(64))
    assert BatchShapeSchedule(length=adaptive()).resumed(None) == BatchShapeSchedule(length=adaptive())


# --- shapes and the length of a run -----------------------------------------------------------------------------------


def test_a_shape_counts_steps_and_tokens_from_one():
    shape_schedule = BatchShapeSchedule(
        length=Discrete(sizes=(8, 16), until=(2,)),
        size=Discrete(sizes=(4, 6), until=(64,)),
        size_unit="tokens",
        read_length=16,
    )
    shapes, steps, tokens = [], 0, 0
    for _ in range(4):
        shape = shape_schedule.shape(steps, tokens)
        shapes.append((shape.num_sequences, shape.sequence_length, shape.num_dropped_tokens))
        steps, tokens = steps + 1, tokens + shape.num_tokens
    assert shapes == [(4, 8, 32), (4, 8, 32), (6, 16, 0), (6, 16, 0)]  # 64 tokens lie behind the third


def test_a_warmup_by_tokens_carries_over_to_other_batch_sizes():
    """Lengths after equally many tokens, of 4 sequences a step and of 32."""
    reached = {}
    for num_sequences in (4, 32):
        shape_schedule = BatchShapeSchedule(
            length=Polynomial(first=8, last=64, duration=10**6, multiple=8),
            length_unit="tokens",
            size=Constant(num_sequences),
        )
        tokens, steps, longer_at = 0, 0, []
        while (length := shape_schedule.shape(steps, tokens).sequence_length) < 64:
            if len(longer_at) < length // 8:
                longer_at.append(tokens)
            steps, tokens = steps + 1, tokens + num_sequences * length
        reached[num_sequences] = longer_at
    assert len(reached[4]) == len(reached[32]) == 7
    assert all(abs(a - b) <= 32 * 64 for a, b in zip(*reached.values()))


pacings = st.builds(
    lambda length, length_unit, size, size_unit, drops: BatchShapeSchedule(
        length=length,
        length_unit=length_unit,
        size=size,
        size_unit=size_unit,
        read_length=max(length.values()) if drops else None,
    ),
    st.sampled_from(
        [
            Constant(16),
            Polynomial(first=8, last=32, duration=20, multiple=8),
            Polynomial(first=8, last=32, duration=900, multiple=8, exponent=0.5),
            Discrete(sizes=(8, 32, 16), until=(3, 7)),
            Periodic(sizes=(8, 32), until=(3, 4)),
        ]
    ),
    st.sampled_from(["steps", "tokens"]),
    st.sampled_from([Constant(4), Polynomial(first=2, last=6, duration=10, multiple=2)]),
    st.sampled_from(["steps", "tokens"]),
    st.booleans(),
)


@given(pacings, st.none() | st.integers(1, 60), st.none() | st.integers(1, 20_000))
def test_the_length_of_a_run_is_that_of_its_steps_one_by_one(shape_schedule, num_steps, num_tokens):
    if num_steps is None and num_tokens is None:
        return
    steps = tokens = dropped = 0
    shapes = []
    while (num_steps is None or steps < num_steps) and (num_tokens is None or tokens < num_tokens):
        shape = shape_schedule.shape(steps, tokens)
        shapes.append(shape)
        steps, tokens, dropped = steps + 1, tokens + shape.num_tokens, dropped + shape.num_dropped_tokens
    run_length = compute_run_length(shape_schedule, num_steps=num_steps, num_tokens=num_tokens)
    assert (run_length.num_steps, run_length.num_tokens, run_length.num_dropped_tokens) == (steps, tokens, dropped)
    if run_length.first_full_step is not None:
        assert len(set(shapes[run_length.first_full_step - 1 :])) == 1
