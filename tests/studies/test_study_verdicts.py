"""Verdicts on precision policies, batches, golden losses and scaling, from plain numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parallel3d.commands.study_batch import judge, noise_of
from parallel3d.commands.study_precision import bytes_per_parameter, watch_policy
from parallel3d.commands.study_scaling import ScalingSeries, _describe
from parallel3d.config.specs.policies import POLICY_SPECS
from parallel3d.costs.fits import BatchCurve
from parallel3d.studies.batch_verdict import judge_batches, nearest_power_of_two
from parallel3d.studies.golden_losses import (
    GoldenLosses,
    compare_with_golden,
    default_rtol,
    settings_that_decide,
)
from parallel3d.studies.precision_verdict import PolicyResult, ReferenceCourse, judge_policies, smoothed
from parallel3d.studies.study_run import StudyRun
from tests.support.tiny_runs import make_config

# --- precision: signs -------------------------------------------------------------------------------------------------

LOSSES = [5.0 * 0.99**step for step in range(100)]
SEEDS = {1: LOSSES, 2: [loss + 0.01 for loss in LOSSES], 3: [loss - 0.01 for loss in LOSSES]}
NORMS = [1.0] * 100


def first_sign(losses: list[float | None], norms: list[float | None] = NORMS) -> tuple[int, str] | None:
    """The step of the first sign, and the sign."""
    find_sign = watch_policy(ReferenceCourse.of(1, SEEDS, NORMS))
    found = ((step, find_sign(loss, norm)) for step, (loss, norm) in enumerate(zip(losses, norms), start=1))
    return next((each for each in found if each[1]), None)


def test_the_reference_itself_and_another_seed_show_no_sign() -> None:
    assert first_sign(LOSSES) is None
    assert first_sign(SEEDS[2]) is None


def test_a_distance_beyond_noise_that_lasts() -> None:
    """Of sd 0.01 three are noise; 0.5 % of the loss is more here."""
    step, sign = first_sign([loss + (0.1 if number >= 50 else 0.0) for number, loss in enumerate(LOSSES)]) or (0, "")
    assert 70 <= step <= 85 and "above the reference's" in sign
    assert first_sign([loss + (0.1 if 50 <= number < 60 else 0.0) for number, loss in enumerate(LOSSES)]) is None
    assert first_sign([loss - 0.1 for loss in LOSSES]) is None  # better


def test_the_noise_is_the_seeds() -> None:
    far = [loss + 0.1 for loss in LOSSES]
    wide = {1: LOSSES, 2: [loss + 0.2 for loss in LOSSES], 3: [loss - 0.2 for loss in LOSSES]}
    find_sign = watch_policy(ReferenceCourse.of(1, wide, NORMS))
    assert first_sign(far) and not any(find_sign(loss, 1.0) for loss in far)


def test_a_loss_that_stays_high() -> None:
    spike = [loss * (1.3 if 30 <= number < 34 else 1.0) for number, loss in enumerate(LOSSES)]
    assert first_sign(spike) is None  # four steps
    stays = [loss * (1.6 if number >= 30 else 1.0) for number, loss in enumerate(LOSSES)]
    assert first_sign(stays) == (35, "step 35: the loss is above 1.2 times its lowest for 5 steps in a row")
    not_finite = [None if number >= 30 else loss for number, loss in enumerate(LOSSES)]
    assert (first_sign(not_finite) or (0, ""))[0] == 35


def test_a_long_spike_of_the_gradient() -> None:
    norms: list[float | None] = [1.0] * 40 + [1.5 * 1.3**number for number in range(60)]
    slightly_above = [loss + 0.005 for loss in LOSSES]
    assert first_sign(slightly_above, norms) == (50, "step 50: the gradient norm is in a spike of 10 steps")
    assert first_sign([loss - 0.005 for loss in LOSSES], norms) is None  # a better loss


def test_smoothing() -> None:
    assert smoothed([1.0, 3.0])[-1] == 2.0 and smoothed([0.0] * 11 + [20.0] * 9)[-1] == 0.0
    assert smoothed([0.0] * 20 + [20.0] * 11)[-1] == 20.0 and math.isinf(smoothed([1.0, None, None])[-1])


# --- precision: the recommendation ------------------------------------------------------------------------------------


def policy(name: str, shift: float, **fields: object) -> PolicyResult:
    losses = {seed: loss + shift + seed * 1e-4 for seed, loss in {1: 2.0, 2: 2.1, 3: 2.2}.items()}
    return replace(PolicyResult(name=name, losses=losses, step_s=0.1, bytes_per_parameter=16.0), **fields)


def test_the_cheapest_that_is_not_worse_is_recommended() -> None:
    fast = policy("bf16", 0.001, step_s=0.05, bytes_per_parameter=18.0)
    pure = policy("bf16_pure", 0.2, step_s=0.04, bytes_per_parameter=8.0)
    verdict = judge_policies([policy("fp32", 0.0), fast, pure], "fp32")
    assert verdict.recommended == "bf16" and "left out: bf16_pure" in verdict.reason
    assert [each.is_fit for each in verdict.judgements] == [True, True, False]
    assert verdict.margin == pytest.approx(0.025, rel=0.01)
    assert judge_policies([policy("fp32", 0.0), fast, pure], "fp32", margin=0.3).recommended == "bf16_pure"
    assert judge_policies([policy("fp32", 0.0), fast], "fp32", by_memory=True).recommended == "fp32"


def test_equal_times_are_decided_by_bytes() -> None:
    ours = [policy("fp32", 0.0), policy("bf16_sr", 0.0, step_s=0.104, bytes_per_parameter=8.0)]
    assert judge_policies(ours, "fp32").recommended == "bf16_sr"
    assert judge_policies([ours[0], replace(ours[1], step_s=0.106)], "fp32").recommended == "fp32"


def test_a_difference_counts_if_it_is_certain_or_large() -> None:
    scattered = {1: 2.3, 2: 2.0, 3: 2.15}  # mean +0.05, no pattern
    verdict = judge_policies([policy("fp32", 0.0), policy("bf16", 0.0, losses=scattered)], "fp32")
    assert verdict.judgements[1].reason == "not worse beyond noise"
    larger = {seed: loss + 0.1 for seed, loss in scattered.items()}
    verdict = judge_policies([policy("fp32", 0.0), policy("bf16", 0.0, losses=larger)], "fp32")
    assert verdict.judgements[1].reason == "worse beyond noise: more than one sd of the reference's seeds"


def test_a_stopped_policy_is_out_and_so_is_a_stopped_reference() -> None:
    stopped = policy("fp16", 0.0, step_s=0.01, losses={}, sign="step 9: the loss is high")
    verdict = judge_policies([policy("fp32", 0.0), stopped], "fp32")
    assert verdict.recommended == "fp32" and verdict.judgements[1].reason == "stopped at step 9: the loss is high"
    assert judge_policies([replace(stopped, name="fp32")], "fp32").recommended is None


def test_bytes_of_a_parameter() -> None:
    found = {name: bytes_per_parameter(POLICY_SPECS[name], "adamw") for name in ("fp32", "bf16", "bf16_sr", "fp16")}
    assert found == {"fp32": 16, "bf16": 18, "bf16_sr": 8, "fp16": 18}
    assert bytes_per_parameter(POLICY_SPECS["fp32"], "lion") == 12


# --- batches ----------------------------------------------------------------------------------------------------------

BLOG = [(6, 3.944), (104, 3.674), (216, 3.725), (224, 3.730), (512, 3.771)]


def test_the_blogs_batches() -> None:
    """C43: 0.0323, -0.2957, 4.3687 and 97.1, an illustration: its runs differ in more than the batch."""
    curve = BatchCurve.fit(BLOG)
    assert (curve.a, curve.c, curve.d) == pytest.approx((0.0323, -0.2957, 4.3687), abs=5e-5)
    verdict = judge(BLOG, curve, noise_sd=None)
    assert verdict.optimum == pytest.approx(97.1, abs=0.05) and verdict.best_measured == 104
    assert verdict.is_illustrative and "one seed" in verdict.doubts[0] and len(verdict.doubts) == 1
    assert nearest_power_of_two(97.1) == 128 and nearest_power_of_two(90.0) == 64 and nearest_power_of_two(1.0) == 1


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        (dict(points=BLOG[:3]), "met by every parabola"),
        (dict(curvature=-0.1), "no minimum"),
        (dict(optimum=5.0), "outside of 6 to 512: try smaller"),
        (dict(optimum=600.0), "try larger"),
        (dict(r_squared=0.8), "explains 80%"),
        (dict(noise_sd=None), "one seed"),
        (dict(noise_sd=0.14), "the seed by sd 0.1400"),
    ],
)
def test_what_makes_an_optimum_an_illustration(change: dict, doubt: str) -> None:
    good = dict(points=BLOG, curvature=0.03, optimum=97.0, r_squared=0.95, noise_sd=0.1)
    assert not judge_batches(**good).is_illustrative
    [found] = judge_batches(**{**good, **change}).doubts
    assert doubt in found


def test_the_noise_of_batches_is_pooled() -> None:
    assert noise_of([[1.0], [2.0]]) is None
    assert noise_of([[1.0, 3.0], [5.0], [1.0, 2.0, 3.0]]) == pytest.approx(((2 * 1 + 1 * 2) / 3) ** 0.5)


# --- golden losses ----------------------------------------------------------------------------------------------------


def golden(**changes: object) -> GoldenLosses:
    fields = dict(policy="fp32", rtol=1e-3, losses={1: 4.0, 2: 2.0, 3: None}, settings={"run.seed": 1})
    return GoldenLosses(**{**fields, **changes})


@pytest.mark.parametrize(
    ("losses", "first"),
    [
        ({1: 4.0, 2: 2.0, 3: None, 4: 1.0}, None),
        ({1: 4.0039, 2: 2.0, 3: None}, None),
        ({1: 4.00412, 2: 2.1, 3: None}, "step 1: loss 4.004120, golden 4.000000, relative 1.03e-03"),
        ({1: 4.0, 2: 2.1, 3: 1.0}, "step 2: loss 2.100000, golden 2.000000, relative 5.00e-02"),
        ({1: 4.0, 2: 2.0, 3: 1.0}, "step 3: loss 1.000000, golden not finite"),
        ({1: 4.0, 2: None, 3: None}, "step 2: loss not finite, golden 2.000000"),
        ({1: 4.0, 2: 2.0}, "step 3 is missing: the golden loss is not finite"),
    ],
)
def test_the_first_step_that_differs_is_named(losses: dict, first: str | None) -> None:
    found = compare_with_golden(golden(), losses, {"run.seed": 1})
    assert found.is_equal == (first is None) and (found.first and str(found.first)) == first


def test_a_tolerance_of_ones_own_and_other_settings() -> None:
    found = compare_with_golden(golden(), {1: 4.5, 2: 2.0, 3: None}, {"run.seed": 2}, rtol=0.2)
    assert found.is_equal and found.settings == ("run.seed: 2, golden 1",)
    assert found.largest is not None and found.largest.step == 1


def test_golden_losses_are_kept_in_json() -> None:
    assert GoldenLosses.from_json(golden().to_json()) == golden()
    assert (default_rtol("fp32"), default_rtol("bf16_sr")) == (1e-3, 2e-2)


def test_settings_that_decide_are_not_the_layouts() -> None:
    one, wide = (make_config(parallel=dict(dp_size=dp)).model_dump() for dp in (1, 2))
    assert settings_that_decide(one) == settings_that_decide(wide)
    other = make_config(run=dict(seed=5)).model_dump()
    assert settings_that_decide(other)["run.seed"] == 5 != settings_that_decide(one)["run.seed"]


# --- runs and scaling -------------------------------------------------------------------------------------------------


def test_the_figures_of_a_run() -> None:
    lines = [
        {"event": "started", "step": 0},
        {"step": 1, "loss": 9.0, "tokens": 10, "step_s": 5.0, "grad_norm": 1.0},
        {"step": 2, "loss": 8.0, "tokens": 20, "step_s": 1.0, "grad_norm": None},
        {"event": "evaluation", "step": 1, "loss": 7.0},
        {"step": 2, "loss": 6.0, "tokens": 20, "step_s": 2.0, "grad_norm": "nan"},
    ]
    run = StudyRun.of_lines("a", 3, lines)
    assert (run.losses, run.grad_norms, run.tokens, run.step_s) == ((9.0, 6.0), (1.0, None), 20, 2.0)
    assert run.evaluation_loss is None and run.judged_loss == run.final_loss == 7.5
    whole = StudyRun.of_lines("a", 3, [*lines, {"event": "evaluation", "step": 2, "loss": 5.0}])
    assert whole.judged_loss == 5.0 and replace(whole, ended="divergence").judged_loss is None
    assert StudyRun.from_json(whole.to_json()) == whole
    assert StudyRun.of_lines("a", 3, []).final_loss is None


def test_the_cost_of_tokens_over_hosts() -> None:
    """D52, with a size that has no memory (70B on 4 nodes)."""
    flat = ScalingSeries(title="measured", price_of_host=21.5, speeds={8: 1.0e6, 4: None, 16: 1.98e6})
    text = "\n".join(_describe([flat]))
    assert "out of memory" in text and "flat: a token costs at most 1.01 times the least" in text
    assert f"{8 * 21.5 / 3600 * 4:.4g}" in text
    steep = "\n".join(_describe([replace(flat, speeds={1: 100.0, 2: 150.0})]))
    assert "not flat: on 2 hosts a token costs 1.33 times the least" in steep
