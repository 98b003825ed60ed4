"""A user's own layers (`model.module`): our Llama, spelled in plain torch, trains as our Llama does, on any layout."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from parallel3d.comparison.compare_runs import compare_runs, tolerance_of
from parallel3d.errors import ConfigError, UserError
from tests.support import own_llama
from tests.support.tiny_runs import make_config, train_in_threads

MODULE = "tests.support.own_llama"
LAYOUTS = {
    "tp2": dict(tp_size=2),
    "pp2": dict(pp_size=2),
    "dp2": dict(dp_size=2),
    "tp2-pp2-dp2": dict(tp_size=2, pp_size=2, dp_size=2),
    "pp2.zb-h1": dict(pp_size=2, schedule="zb-h1"),
    "virtual-stages": dict(pp_size=2, virtual_stages=2, schedule="interleaved"),
    "recomputed": dict(pp_size=2, recompute="full"),
    "zero-0": dict(dp_size=2, zero_stage=0),
}


@cache
def run(function: str | None = None, policy: str = "fp64", layout: tuple = ()):
    model = dict(num_key_value_heads=2, module=function and f"{MODULE}:{function}")
    config = dict(model=model, parallel=dict(layout), precision=dict(policy=policy), run=dict(seed=own_llama.SEED))
    return train_in_threads(**config)


@pytest.mark.parametrize("function", ["build", "build_replicated", "build_whole"])
def test_it_is_the_llama_that_it_spells(function):
    """In fp64, so that only the last bits differ; build_whole's first gradient is another order of the same sums."""
    ours, own = run(), run(function)
    assert own.losses == pytest.approx(ours.losses, rel=1e-10)
    assert ours.losses[-1] < ours.losses[0] - 0.1
    shared = ours.weights.keys() & own.weights.keys()
    assert len(shared) >= 4 * 6
    for name in shared:
        torch.testing.assert_close(own.weights[name], ours.weights[name], rtol=1e-7, atol=1e-9)


@pytest.mark.each_value
@pytest.mark.parametrize("function", ["build", "build_replicated", "build_whole", "build_with_normed_heads"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(layout, function):
    one, found = run(function), run(function, layout=tuple(LAYOUTS[layout].items()))
    assert compare_runs(found, one, tolerance_of(make_config())).findings == ()


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_in_narrower_formats(policy):
    ours, own = run(policy=policy), run("build", policy=policy)
    assert own.losses == pytest.approx(ours.losses, rel=1e-5 if policy == "fp32" else 2e-2)


WRONG = """
import torch
from parallel3d import Column, ModelParts
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)
    def forward(self, x):
        return {forward}
def build(model):
    return {parts}
"""
PARTS = "ModelParts(block=lambda index: Block())"


@pytest.mark.parametrize(
    "forward,parts,words",
    [
        ("self.linear(x) + torch.ones(7)", PARTS, r"wrong.py, line 9, in forward.*RuntimeError"),
        ("self.linear(x)", "ModelParts(block=lambda index: Blok())", r"wrong.py, line 11.*NameError"),
        ("self.linear(x)", "3", r"returned int, not parallel3d.ModelParts"),
        ("self.linear(x)[:, 1:]", PARTS, r"a block returned a tensor \(1, 15, 32\), not a tensor \(1, 16, 32\)"),
        (
            "self.linear(x)",
            "ModelParts(block=lambda index: Block(), shardings={'linnear': Column()})",
            "shardings has linnear, which layers.0 has not; its weights are linear.weight, linear.bias",
        ),
        (
            "self.linear(x)",
            "ModelParts(block=lambda index: torch.nn.Dropout(0.1))",
            "drops by torch's random numbers",
        ),
    ],
    ids=["in-forward", "in-build", "no-parts", "wrong-shape", "wrong-name", "dropout"],
)
def test_an_error_names_the_users_line(tmp_path, forward, parts, words):
    (tmp_path / "wrong.py").write_text(WRONG.format(forward=forward, parts=parts))
    with pytest.raises(UserError, match=words):
        train_in_threads(model=dict(module=f"{tmp_path / 'wrong.py'}:build"), steps=1)


def test_what_cannot_apply_is_refused():
    with pytest.raises(ConfigError, match="parallel.recompute(.|\n)*only whole layers"):
        make_config(model=dict(module="a:b"), parallel=dict(recompute="selective"))
    with pytest.raises(ConfigError, match="names no function"):
        make_config(model=dict(module="a"))
