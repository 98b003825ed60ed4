"""Every layout trains like one process: losses, every gradient, gradient norms, weights, evaluation, text read.

How near they must be, and why, is said in parallel3d/comparison/compare_runs.py; `launch/verify.py` judges by the same
code.
"""

import pytest
import torch

from parallel3d.comparison.compare_runs import compare_runs
from parallel3d.optim.bucket import Bucket
from tests.support.cell_table import CELLS
from tests.support.cells import run_cell
from tests.support.gloo_cells import load_gloo_cell


@pytest.mark.each_value(rest=16)
@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.transport == "gloo" else []) for c in CELLS]
)
def test_cell_equals_one_process(cell, reference, request):
    run = {"threads": run_cell, "gloo": lambda c: load_gloo_cell(request.getfixturevalue("gloo_folder"), c)}
    ours = run[cell.transport](cell)
    assert len(ours.losses) == cell.steps
    assert compare_runs(ours, reference(cell), cell.tolerance).findings == ()


def test_formats_stay_near_fp64(run_layout):
    """The references of the narrower formats are right themselves: fp32 to 1e-4 after three steps, bf16 to 2 %."""
    wide = run_layout().losses
    assert run_layout(precision=dict(policy="fp32")).losses == pytest.approx(wide, rel=1e-4)
    assert run_layout(precision=dict(policy="fp16")).losses == pytest.approx(wide, rel=2e-3)
    for policy in ("bf16", "bf16_sr"):
        assert run_layout(precision=dict(policy=policy)).losses == pytest.approx(wide, rel=2e-2), policy
    assert run_layout(model=dict(hidden_dropout=0.2)).losses != pytest.approx(wide, rel=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp,pp,dp,zero", [(1, 1, 4, 1), (2, 2, 2, 1), (1, 4, 2, 0)])
def test_overlap_changes_no_bit(run_layout, tp, pp, dp, zero, tied):
    parallel = dict(tp_size=tp, pp_size=pp, dp_size=dp, zero_stage=zero)
    runs = [
        run_layout(
            precision=dict(policy="fp32"),
            model=dict(tie_word_embeddings=tied),
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
