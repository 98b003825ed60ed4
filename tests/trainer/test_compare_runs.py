"""What counts as equal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallel3d.comparison.compare_runs import BITWISE, compare_runs, relative_difference, tolerance_of
from parallel3d.config.specs.policies import POLICY_SPECS
from parallel3d.precision.policy import POLICIES
from tests.support.tiny_runs import make_config


def test_every_policy_says_what_it_is_allowed():
    assert POLICY_SPECS.keys() == POLICIES.keys()
    assert all(spec.tolerance.why for spec in POLICY_SPECS.values())


def test_exact_sums_are_allowed_nothing_where_tensors_are_not_cut():
    exact = dict(precision=dict(policy="fp32", sums="exact"))
    assert tolerance_of(make_config(parallel=dict(dp_size=2), **exact)) == BITWISE
    assert tolerance_of(make_config(parallel=dict(tp_size=2), **exact)) == POLICY_SPECS["fp32"].tolerance


def test_differences_are_relative_and_never_nan():
    ones = torch.ones(4)
    assert relative_difference(ones, ones) == 0
    assert relative_difference(ones * 1.5, ones) == 0.5
    assert relative_difference(torch.full((4,), float("nan")), ones) == float("inf")
    assert relative_difference(ones * float("inf"), ones * float("inf")) == float("inf")
    assert relative_difference(torch.zeros(4), torch.zeros(4)) == 0


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("first_gradients", "the first step's gradient of head.weight differs by 1.0e-03 (1e-10 is allowed)"),
        ("gradients", "the last step's gradient of head.weight differs by 1.0e-03 (1e-10 is allowed)"),
        ("weights", "the trained head.weight differs by 1.0e-03 (1e-10 is allowed)"),
        ("initial", "1 initial weights differ, including head.weight"),
        ("losses", "the loss of step 2 differs by 1.0e-01 (1e-10 is allowed), and 1 more of 3 do: loss of step 1"),
        ("grad_norms", "the gradient norm of step 2 differs by 1.0e-01 (1e-10 is allowed), and 1 more"),
        ("evaluation", "the loss of the evaluation differs by 1.0e-03 (1e-10 is allowed)"),
        ("entries", "the runs have read different data"),
    ],
)
def test_each_thing_that_differs_is_told(run_layout, what: str, sentence: str):
    """Two runs that are equal but for one thing."""
    run = run_layout(steps=2)
    assert compare_runs(run, run, POLICY_SPECS["fp64"].tolerance).is_equal
    value = getattr(run, what)
    if isinstance(value, dict):
        changed = {**value, "head.weight": value["head.weight"] * 1.001}
    elif what == "entries":
        changed = tuple(replace(entry, cursors=entry.cursors[::-1]) for entry in value)
    else:
        changed = value * 1.001 if isinstance(value, float) else (value[0] * 1.001, value[1] * 1.1)
    comparison = compare_runs(replace(run, **{what: changed}), run, POLICY_SPECS["fp64"].tolerance)
    assert len(comparison.findings) == 1 and comparison.findings[0].startswith(sentence)


def test_steps_that_adamw_makes_of_rounding_do_not_count(run_layout):
    """A weight whose gradient is rounding may be anywhere; one whose gradient is 0 on both sides, or real, may not."""
    run = run_layout(steps=1)
    name = "final_norm.weight"
    gradient = run.gradients[name].clone()
    gradient[0], gradient[1] = 1e-14, 0.0
    right = replace(run, gradients={**run.gradients, name: gradient}, first_gradients={**run.gradients, name: gradient})
    for element, is_equal in ((0, True), (1, False), (2, False)):
        weight = run.weights[name].clone()
        weight[element] += 0.01
        ours = replace(right, weights={**run.weights, name: weight})
        assert compare_runs(ours, right, POLICY_SPECS["fp64"].tolerance).is_equal == is_equal


def test_everything_beyond_is_named_up_to_a_few(run_layout):
    run = run_layout(steps=1)
    spoilt = {name: weight * 2 for name, weight in run.weights.items()}
    (finding,) = compare_runs(replace(run, weights=spoilt), run, POLICY_SPECS["fp32"].tolerance).findings
    assert f"and {len(spoilt) - 1} more of {len(spoilt)} do" in finding and finding.endswith(", ...")


def test_a_step_that_overflows_on_both_sides_is_not_compared(run_layout):
    """Policy fp16 begins with a scale that is too large: nothing is updated. On one side alone it counts."""
    changes = dict(precision=dict(policy="fp16", loss_scale=dict(initial=2.0**40)), run=dict(evaluate_batches=1))
    runs = [run_layout(steps=2, parallel=parallel, **changes) for parallel in ({}, dict(dp_size=2, pp_size=2))]
    assert not runs[0].entries[0].finite
    assert compare_runs(runs[1], runs[0], POLICY_SPECS["fp16"].tolerance).findings == ()
    fine = run_layout(steps=2, precision=dict(policy="fp16"))
    findings = compare_runs(runs[1], fine, POLICY_SPECS["fp16"].tolerance).findings
    assert any("gradient" in finding for finding in findings)
