"""A user's own layers (`model.module`): our Llama, spelled in plain torch, trains as our Llama does, on any layout."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
import torch

from parallel3d.comparison.compare_runs import compare_runs, tolerance_of
from parallel3d.data.conversation_lanes import ConversationLanes
from parallel3d.data.documents import TokenizedDocuments
from parallel3d.data.run_data import lanes_of
from parallel3d.data.tokenizer import ByteTokenizer
from parallel3d.errors import ConfigError, UserError
from parallel3d.inprocess.harness import run_in_threads
from parallel3d.trainer.plans import build_grid
from tests.support import own_llama, plain_llama
from tests.support.chats import EOS, ChatTexts
from tests.support.tiny_runs import build, make_config, train_in_threads

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


CHAT = dict(global_batch_size=8, micro_batch_size=2, sequence_length=150)


@cache
def run_on_replies(function: str | None, layout: tuple = ()):
    """Two steps on conversations of which only replies are targets; own layers can't pack them."""
    model = dict(num_key_value_heads=2, module=function and f"{MODULE}:{function}")
    others = dict(parallel=dict(layout), precision=dict(policy="fp64"), run=dict(seed=own_llama.SEED))
    config = make_config(model=model, data=dict(chat=dict(pack=False)), batch=CHAT, **others)
    grid = build_grid(config)
    return run_in_threads(grid, partial(build, config, grid, train_lanes=unpacked_lanes()), 2)


def unpacked_lanes() -> ConversationLanes:
    config = make_config(data=dict(chat=dict(pack=False)))
    return lanes_of(config)(TokenizedDocuments(ChatTexts(), ByteTokenizer()), own_llama.SEED, CHAT["global_batch_size"])


def loss_by_hand(weights) -> tuple[float, int]:
    """The mean loss of the replies' tokens of the first step in plain torch, and their number."""
    config, lanes = make_config(model=dict(num_key_value_heads=2)), unpacked_lanes()
    first = [lanes.read(lane, lanes.start(lane), CHAT["sequence_length"])[0] for lane in range(lanes.num_lanes)]
    rows = torch.tensor(np.stack(first)).long()
    assert ((rows == EOS).sum(1) == 1).all()  # a conversation each
    ids, labels = torch.where(rows < 0, ~rows, rows)[:, :-1], torch.where(rows < 0, -100, rows)[:, 1:]
    count = int((labels >= 0).sum())
    return float(plain_llama.plain_loss(config.model, weights, ids, labels)) / count, count


@pytest.mark.parametrize("function", ["build", "build_whole"])
def test_only_targets_count(function):
    """With our head and with one of the user's."""
    ours, own = run_on_replies(None), run_on_replies(function)
    loss, count = loss_by_hand(ours.initial)
    assert 0 < count < 0.3 * 8 * CHAT["sequence_length"]
    assert [entry.num_loss_tokens for entry in own.entries] == [entry.num_loss_tokens for entry in ours.entries]
    assert own.entries[0].num_loss_tokens == count and own.losses[0] == pytest.approx(loss, rel=1e-10)
    assert own.losses == pytest.approx(ours.losses, rel=1e-10)


@pytest.mark.each_value
@pytest.mark.parametrize("function", ["build", "build_whole"])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2", "pp2.zb-h1", "zero-0"])
def test_targets_count_alike_on_every_layout(layout, function):
    one, found = run_on_replies(function), run_on_replies(function, tuple(LAYOUTS[layout].items()))
    assert [entry.num_masked_tokens for entry in found.entries] == [entry.num_masked_tokens for entry in one.entries]
    assert compare_runs(found, one, tolerance_of(make_config())).findings == ()
    assert found.losses == pytest.approx(one.losses, rel=1e-11)


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
