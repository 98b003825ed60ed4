"""Speeds, shares of the time, and model FLOPs utilisation, with clocks that are numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.monitor import device_peak
from parallel3d.monitor.device_peak import measure_peak
from parallel3d.monitor.evaluation_interval import EvaluationInterval, MovingThroughput, plan_evaluations
from parallel3d.monitor.flops import Peak, data_sheet_peak, describe_mfu, mfu


def test_the_moving_window_holds_ten_steps():
    speed = MovingThroughput()
    assert speed.tokens_per_s == 0.0
    for step in range(30):
        speed.record(num_tokens=100, num_sequences=4, step_s=10.0 if step < 20 else 0.5)
    assert speed.tokens_per_s == 200.0 and speed.sequences_per_s == 8.0


@given(st.floats(0.01, 0.9), st.floats(0.1, 50.0), st.floats(0.01, 5.0))
def test_evaluations_take_no_more_than_their_share(share, evaluation_s, step_s):
    """From the second on, of which the time is known; and not much less: one step would have been too many."""
    interval = EvaluationInterval(share=share, num_batches=4)
    interval.record_evaluation(evaluation_s)
    seconds = 0.0
    while not interval.is_due:
        interval.record_step(step_s)
        seconds += step_s
    assert evaluation_s <= share * (seconds + evaluation_s) + 1e-9
    steps_before = interval.num_steps - 1
    assert interval.num_steps == 2 or evaluation_s > share * (steps_before * step_s + evaluation_s) - 1e-9


def test_the_first_evaluation_is_guessed_from_the_steps():
    """6 batches of forward passes are two steps' time: at a tenth, 18 steps of training."""
    interval = EvaluationInterval(share=0.1, num_batches=6)
    while not interval.is_due:
        interval.record_step(1.0)
    assert interval.num_steps == 18


def test_without_a_share_none_is_ever_due():
    interval = EvaluationInterval(share=None, num_batches=1)
    for _ in range(100):
        interval.record_step(1e9)
    assert not interval.is_due


def test_the_plan_of_a_run_of_three_and_a_quarter_hours():
    """2.57 steps/s and 100 batches in 11 s: every 4 minutes are 617 steps, and 300 batches take 33 s."""
    plan = plan_evaluations(num_steps=round(50 * 240 * 2.57), step_s=1 / 2.57, batch_s=0.11, share=33 / 240)
    assert (plan.every, plan.num_batches) == (617, 300)
    assert plan.evaluation_s == pytest.approx(33.0)


@given(st.integers(1, 100_000), st.floats(0.001, 10.0), st.floats(0.001, 1000.0), st.floats(0.001, 0.5))
def test_a_plan_keeps_its_share(num_steps, step_s, batch_s, share):
    """Also in short runs, where 50 evaluations of one batch would take more."""
    plan = plan_evaluations(num_steps=num_steps, step_s=step_s, batch_s=batch_s, share=share)
    if plan is None:
        assert batch_s > share * num_steps * step_s * (1 - 1e-6)
        return
    assert plan.num_evaluations == num_steps // plan.every >= 1
    assert plan.share == pytest.approx(plan.num_evaluations * plan.num_batches * batch_s / (num_steps * step_s))
    assert plan.share <= share * (1 + 1e-6)


def test_peaks_are_found_by_the_devices_name():
    assert data_sheet_peak("NVIDIA H100 80GB HBM3", "bf16") == Peak(flops_per_s=989.4e12, source="data sheet")
    assert data_sheet_peak("NVIDIA H100 PCIe", "bf16").flops_per_s == 756.4e12
    assert data_sheet_peak("NVIDIA A100-SXM4-80GB", "bf16").flops_per_s == 312e12
    assert data_sheet_peak("NVIDIA A10G", "bf16").flops_per_s == 70e12
    assert data_sheet_peak("NVIDIA L40S", "fp16").flops_per_s == 362e12
    assert data_sheet_peak("NVIDIA RTX A4000", "bf16") is None  # no A40
    assert data_sheet_peak("Tesla V100-SXM2-16GB", "bf16") is None  # it has no such products
    assert data_sheet_peak("", "fp32") is None


def test_mfu_by_hand():
    """PaLM 540B: 238.3k tokens/s on 6144 chips of 275 TFLOP/s, 46.2 %."""
    peak = Peak(flops_per_s=275e12, source="data sheet")
    work = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    assert mfu(flops_per_s=238.3e3 * work, num_devices=6144, peak=peak) == pytest.approx(0.462, abs=0.003)


@pytest.mark.parametrize("number_format", [torch.float32, torch.bfloat16, torch.float64])
def test_a_cpus_peak_is_measured(number_format):
    peak = measure_peak(torch.device("cpu"), number_format)
    assert peak.source == "measured" and 1e8 < peak.flops_per_s < 1e15


@pytest.mark.parametrize("has_bf16, library", [(True, "onednn"), (False, "widened")])
def test_a_peak_in_bf16_is_that_of_what_a_run_multiplies_with(monkeypatch, has_bf16, library):
    """Or MFU would be above 100 % on processors that only emulate bf16."""
    used = set()
    monkeypatch.setattr(device_peak, "multiplies_bf16", lambda: has_bf16)
    monkeypatch.setattr(device_peak, "matmul", lambda a, b, library: used.add(library))
    measure_peak(torch.device("cpu"), torch.bfloat16)
    assert used == {library}


@pytest.mark.parametrize(
    ("source", "words"), [("measured", "measured under load"), ("configuration", "(configuration), which is too low")]
)
def test_an_mfu_above_100_percent_is_never_printed(source, words):
    assert describe_mfu(0.413, 1e12, source) == "41.3%"
    told = describe_mfu(1.029, 3e10, source)
    assert "102" not in told and "30 GFLOP/s" in told and words in told and "monitor.peak_flops" in told
