"""The monitors against numbers by hand, and against those of the papers."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.monitor.divergence import Divergence, DivergenceRules
from parallel3d.monitor.loss_ratio import LossRatio
from parallel3d.monitor.spikes import WINDOW, Spikes
from parallel3d.monitor.training_monitor import StepMetrics, TrainingMonitor

numbers = st.floats(0.0, 1e6) | st.just(math.nan) | st.just(math.inf)


def apply_all(start, values):
    for value in values:
        start = start.after(value)
    return start


# --- loss ratio -------------------------------------------------------------------------------------------------------


def test_loss_ratio_by_hand():
    seen, ratios = LossRatio(), []
    for loss in [4.0, 3.0, 3.3, 2.5, 5.0, 2.6]:
        seen = seen.after(loss)
        ratios.append(seen.newest)
    assert ratios == [None, 0.75, pytest.approx(1.1), pytest.approx(2.5 / 3.0), 2.0, pytest.approx(1.04)]
    assert (seen.largest, seen.num_unstable, seen.lowest) == (2.0, 1, 2.5)


@pytest.mark.parametrize(
    "num_unstable, num_steps, percent",
    [(22, 37_500, 0.06), (114, 300_000, 0.04), (1381, 37_500, 3.68), (219, 55_000, 0.40), (1179, 58_800, 2.01)],
)
def test_the_percentages_of_the_papers_table_1(num_unstable, num_steps, percent):
    assert round(100 * LossRatio(num_steps=num_steps, num_unstable=num_unstable).unstable_share, 2) == percent


def test_a_loss_that_is_nan_is_unstable_and_not_a_minimum():
    seen = apply_all(LossRatio(), [2.0, math.nan, math.inf])
    assert (seen.newest, seen.num_unstable, seen.num_not_finite, seen.lowest) == (None, 2, 2, 2.0)
    assert seen.after(1.0).newest == 0.5


@given(st.lists(st.floats(0.1, 100.0), min_size=2, max_size=30))
def test_a_ratio_above_one_is_worse_than_all_before(losses):
    ratio = apply_all(LossRatio(), losses).newest
    assert (ratio > 1.0) == (losses[-1] > min(losses[:-1]))


# --- spikes -----------------------------------------------------------------------------------------------------------


def test_spikes_of_one_and_of_two_steps():
    """The second norm of a long spike is compared with a mean that the first one has raised: 6.0 against 1.25."""
    calm = [1.0] * 25
    seen = apply_all(Spikes(), [*calm, 6.0, *calm, 6.0, 6.0, *calm])
    assert seen.histogram == {1: 1, 2: 1} and seen.single_step_share == 0.5


def test_a_long_spike_is_counted_and_reported_before_it_ends():
    seen = apply_all(Spikes(), [1.0] * 20 + [5.0] * 3)
    assert seen.length == 3 and seen.histogram == {3: 1} and seen.ended == {}
    assert seen.after(1.0).ended == {3: 1}


def test_the_margin_is_a_tenth_above_the_mean():
    calm = apply_all(Spikes(), [1.0] * 20)
    assert calm.after(1.0999).length == 0 and calm.after(1.1001).length == 1


def test_no_spike_before_the_mean_is_known():
    assert apply_all(Spikes(), [1.0] * (WINDOW - 1) + [50.0]).histogram == {}


def test_a_new_level_is_not_a_spike_forever():
    assert apply_all(Spikes(), [1.0] * 20 + [3.0] * 100).histogram == {19: 1}


def test_an_infinite_norm_is_a_spike_and_not_in_the_mean():
    seen = apply_all(Spikes(), [1.0] * 20 + [math.inf, math.nan, 1.0])
    assert seen.histogram == {2: 1} and seen.recent == (1.0,) * 20


# --- divergence -------------------------------------------------------------------------------------------------------


def run_into(losses, variance, *, limit=1.0, norm=5.0, beta2=0.95, **rules):
    """Step of the first sign, and the sign; the gradient is clipped all along unless `norm` is below the limit."""
    monitor = TrainingMonitor(max_grad_norm=limit, divergence=Divergence(rules=DivergenceRules(beta2=beta2, **rules)))
    for step, (loss, largest) in enumerate(zip(losses, variance), 1):
        monitor = monitor.after(StepMetrics(loss=loss, grad_norm=norm, variance_max=largest))
        if monitor.divergence_reason:
            return step, monitor.divergence_reason
    return None


def test_flat_after_divergence():
    """27 updates are the half-life of sqrt(v) at beta2 0.95; the mean loss takes two steps to get high."""
    losses, variance = [3.0] * 50 + [9.0] * 100, [0.01] * 50 + [0.9] * 100
    step, reason = run_into(losses, variance)
    assert step == 52 + 27 and "for 27 updates" in reason and "(0.9 to 0.9)" in reason


@pytest.mark.parametrize(
    "losses, variance, changes",
    [
        ([3.0] * 150, [0.9] * 150, {}),  # nothing is wrong
        ([3.0] * 50 + [9.0] * 100, [0.9 * 0.95 ** (i / 2) for i in range(150)], {}),  # v decays: gradients are small
        ([3.0] * 50 + [9.0 - 0.02 * i for i in range(100)], [0.9] * 150, {}),  # the loss recovers
        ([3.0] * 50 + [9.0] * 100, [0.9] * 150, dict(norm=0.5)),  # nothing is clipped
        ([3.0] * 50 + [9.0] * 100, [0.9] * 150, dict(limit=None)),
        ([3.0] * 50 + ([9.0] * 20 + [3.0]) * 5, [0.9] * 155, {}),  # spikes
        ([3.0] * 50 + [9.0] * 100, [None] * 150, {}),  # not measured
        ([3.0] * 50 + [9.0] * 100, [0.9] * 150, dict(beta2=0.999)),  # 1386 updates are to be waited for
    ],
)
def test_no_false_alarm(losses, variance, changes):
    assert run_into(losses, variance, **changes) is None


def test_flat_lines_are_seen_where_few_are_measured():
    variance = [0.9 if i % 10 == 0 else None for i in range(150)]
    assert run_into([3.0] * 50 + [9.0] * 100, variance)[0] == 79


def test_a_line_that_becomes_flat_late():
    losses, rising = [3.0] * 50 + [9.0] * 150, [0.01 * 1.05**i for i in range(100)]
    step, _ = run_into(losses, [0.01] * 50 + rising + [1.4] * 100)
    assert 150 < step <= 150 + 27


def test_a_largest_loss_ratio():
    assert run_into([3.0, 2.0, 5.9], [0.1] * 3, max_loss_ratio=3.0) is None
    step, reason = run_into([3.0, 2.0, 6.1], [0.1] * 3, max_loss_ratio=3.0)
    assert step == 3 and reason == "the loss is 3.05 times the lowest before, monitor.max_loss_ratio is 3"


def test_a_warning_is_given_again_only_after_another_row():
    monitor, told = TrainingMonitor(max_grad_norm=1.0, divergence=Divergence(rules=DivergenceRules(ends_run=False))), []
    for step in range(1, 101):
        monitor = monitor.after(StepMetrics(loss=1.0 if step <= 20 else 9.0, grad_norm=5.0, variance_max=0.9))
        if monitor.divergence_reason:
            told.append(step)
    assert told == [47, 74] and monitor.stop_reason == ""


def test_clipped_gradients_do_not_bound_the_second_moment():
    """Appendix A.3.2 of the paper: while a spike lasts, v of one element goes to the clip's square."""
    second_moment = 0.0
    for _ in range(400):
        second_moment = 0.95 * second_moment + 0.05 * 1.0**2
    assert math.sqrt(second_moment) == pytest.approx(1.0, abs=1e-6)


# --- all together -----------------------------------------------------------------------------------------------------


def test_figures_of_a_step():
    monitor = TrainingMonitor(max_grad_norm=1.0)
    monitor = monitor.after(StepMetrics(loss=2.0, grad_norm=3.0, param_norm=7.0, variance_norm=0.5, variance_max=0.1))
    monitor = monitor.after(StepMetrics(loss=1.0, grad_norm=0.5))
    assert monitor.figures() == {"perplexity": pytest.approx(math.e), "loss_ratio": 0.5, "fraction_clipped": 0.5}
    skipped = monitor.after(StepMetrics(loss=math.nan, grad_norm=None))
    assert skipped.figures() == {"fraction_clipped": 0.5} and skipped.num_updates == 2


def test_clipping_that_is_off_has_no_fraction():
    assert TrainingMonitor().after(StepMetrics(loss=1.0, grad_norm=100.0)).fraction_clipped is None


@given(st.lists(st.tuples(numbers, st.none() | numbers), max_size=60), st.integers(0, 60))
def test_a_fold_that_was_saved_goes_on_alike(steps, cut):
    """Through JSON, as a checkpoint keeps it."""
    rules = Divergence(rules=DivergenceRules(beta2=0.9, max_loss_ratio=50.0))
    fresh = TrainingMonitor(max_grad_norm=1.0, divergence=rules)
    metrics = [StepMetrics(loss=loss, grad_norm=norm, variance_max=norm) for loss, norm in steps]
    saved = json.loads(json.dumps(apply_all(fresh, metrics[:cut]).to_json()))
    again = apply_all(fresh.from_json(saved), metrics[cut:])
    assert repr(again) == repr(apply_all(fresh, metrics))


def test_a_long_run_of_noise_has_no_sign_of_divergence():
    draw = random.Random(1)
    losses = [3.0 + draw.gauss(0.0, 0.5) for _ in range(3000)]
    variance = [0.1 + 0.01 * draw.random() for _ in range(3000)]
    assert run_into(losses, variance) is None
    assert apply_all(LossRatio(), losses).num_unstable > 2900, "single losses are far above the lowest"
