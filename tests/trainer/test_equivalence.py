"""Every layout trains like one process: losses, every gradient, gradient norms, weights, evaluation."""

import pytest
import torch
from cells import CELLS, load_gloo_cell, run_cell

from parallel3d.optim.bucket import Bucket
from parallel3d.trainer.verify import largest_difference

# fp64: sums of a few thousand terms in another order differ by some 1e-15 a step; AdamW divides by sqrt(v), which
# magnifies that for elements whose gradient is near zero, three steps in a row. fp32 has 24 bits. bf16 activations have
# 8, and layouts round at other places (before or after a tensor-parallel sum); bf16_sr rounds gradients, too.
LOSS_TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2, "bf16_sr": 1e-2}
TENSOR_TOLERANCE = {"fp64": 1e-10}


@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * (c.transport == "gloo")) for c in CELLS]
)
def test_cell_equals_one_process(cell, reference, request):
    run = {"threads": run_cell, "gloo": lambda c: load_gloo_cell(request.getfixturevalue("gloo_folder"), c)}
    ours, theirs = run[cell.transport](cell), reference(cell)
    tolerance = cell.loss_tolerance or LOSS_TOLERANCE[cell.policy]
    assert len(ours.losses) == cell.steps
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    assert ours.evaluation == pytest.approx(theirs.evaluation, rel=tolerance)
    assert [e.cursors for e in ours.entries] == [e.cursors for e in theirs.entries]
    assert all(torch.equal(ours.initial[name], theirs.initial[name]) for name in theirs.initial)
    if cell.policy in TENSOR_TOLERANCE:
        assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=tolerance)
        for mine, yours in ((ours.gradients, theirs.gradients), (ours.weights, theirs.weights)):
            difference, name = largest_difference(mine, yours)
            assert difference < TENSOR_TOLERANCE[cell.policy], name


def test_formats_stay_near_fp64(run_layout):
    """What the narrower formats are compared with is itself right: fp32 to 1e-4 after three steps, bf16 to 2 %."""
    wide = run_layout().losses
    assert run_layout(precision=dict(policy="fp32")).losses == pytest.approx(wide, rel=1e-4)
    for policy in ("bf16", "bf16_sr"):
        assert run_layout(precision=dict(policy=policy)).losses == pytest.approx(wide, rel=2e-2), policy
    assert run_layout(model=dict(hidden_dropout=0.2)).losses != pytest.approx(wide, rel=1e-4)


@pytest.mark.parametrize("tp,pp,dp,zero", [(1, 1, 4, 1), (2, 2, 2, 1), (1, 4, 2, 0)])
def test_overlap_changes_no_bit(run_layout, tp, pp, dp, zero):
    parallel = dict(tp_size=tp, pp_size=pp, dp_size=dp, zero_stage=zero)
    runs = [
        run_layout(
            precision=dict(policy="fp32"),
            parallel=dict(overlap_grad_reduce=a, overlap_param_gather=b, **parallel),
        )
        for a, b in ((True, True), (False, False), (True, False))
    ]
    for other in runs[1:]:
        assert other.entries == runs[0].entries
        assert all(torch.equal(other.weights[name], weight) for name, weight in runs[0].weights.items())


def test_norms_and_biases_decay_only_on_request(run_layout):
    plain, decayed = (
        run_layout(steps=1, optimizer=dict(weight_decay=0.9, decay_norms_and_biases=on, max_grad_norm=None))
        for on in (False, True)
    )
    changed = {name for name in plain.weights if not torch.equal(plain.weights[name], decayed.weights[name])}
    assert changed == {name for name in plain.weights if "norm" in name}


def test_forgetting_to_sum_the_gradients_of_copies_is_seen(monkeypatch):
    """Each rank would train its copy of the head with its own query heads' part of the gradient."""
    monkeypatch.setattr(Bucket, "sum_copies", lambda bucket, tp: None)
    forgetful = next(cell for cell in CELLS if cell.name == "copied-heads-tp2-kv1")
    with pytest.raises(AssertionError, match="qkv.weight differs between copies"):
        run_cell(forgetful)
