"""A user's own layers (`model.module`): our Llama, spelled in plain torch, trains as our Llama does, on any layout."""

from __future__ import annotations

from dataclasses import replace
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
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.placement import LayerContext
from parallel3d.models.user_calls import KeyedDropout, PartCall, document_arguments
from parallel3d.parallel.tensor_parallel import solo_region
from parallel3d.precision.policy import policy_of
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
    "partly-recomputed": dict(tp_size=2, pp_size=2, recompute="selective"),
    "zero-0": dict(dp_size=2, zero_stage=0),
}


@cache
def run(function: str | None = None, policy: str = "fp64", layout: tuple = (), length: int = 16, documents=False):
    model = dict(num_key_value_heads=2, module=function and f"{MODULE}:{function}")
    config = dict(model=model, parallel=dict(layout), precision=dict(policy=policy), run=dict(seed=own_llama.SEED))
    config |= dict(batch=dict(sequence_length=length), data=dict(document_mask=documents))
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


@pytest.mark.each_value(rest=10)
@pytest.mark.parametrize(
    "function", ["build", "build_replicated", "build_whole", "build_with_normed_heads", "build_with_dropout"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(layout, function):
    one, found = run(function), run(function, layout=tuple(LAYOUTS[layout].items()))
    assert compare_runs(found, one, tolerance_of(make_config())).findings == ()


def test_documents_are_kept_apart_as_by_our_llama():
    """By the numbers of documents that the block's forward asks for, which also reach the second stage."""
    masked = dict(length=64, documents=True)
    ours, own = run(**masked), run("build", **masked)
    assert own.losses == pytest.approx(ours.losses, rel=1e-10)
    assert own.losses[0] != pytest.approx(run("build", length=64).losses[0], rel=1e-4)


@pytest.mark.full
def test_documents_on_layouts():
    masked = dict(length=64, documents=True)
    one = run("build_with_dropout", **masked)
    for layout in ("tp2-pp2-dp2", "partly-recomputed"):
        found = run("build_with_dropout", layout=tuple(LAYOUTS[layout].items()), **masked)
        assert compare_runs(found, one, tolerance_of(make_config())).findings == ()


def test_positions_and_documents_are_those_in_the_sequence():
    """Whatever else is in the micro-batch."""
    both = MicroBatch(seed=1, iteration=1, slots=(3, 4), sequence_length=5, documents=(2, 3, 1, 1, 3))
    found = document_arguments(both, torch.device("cpu"))
    assert found["positions"].tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]]
    assert found["documents"].tolist() == [[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]]
    plain = document_arguments(replace(both, documents=None), torch.device("cpu"))
    assert plain["positions"].tolist() == [[0, 1, 2, 3, 4]] * 2 and plain["documents"] is None


def test_dropout_drops_as_it_should():
    """About a fifth, other elements at each place and step, none in an evaluation, the same in another micro-batch."""
    context = LayerContext(tp=solo_region(), policy=policy_of(make_config().precision))
    call = PartCall(context)
    drop, x = KeyedDropout(0.2, call, part="layers.2", path="drop", divided_dim=None), torch.ones(2, 16, 3, 50)

    def masks(iteration: int, slots: tuple[int, ...], **changes) -> list[torch.Tensor]:
        call.begin(MicroBatch(seed=1, iteration=iteration, slots=slots, sequence_length=16, **changes))
        return [drop(x[: len(slots)]) for _ in range(2)]

    (first, second), (later, _), (alone, _) = masks(1, (6, 7)), masks(2, (6, 7)), masks(1, (7,))
    for found in (first, second, later):
        assert float((found == 0).float().mean()) == pytest.approx(0.2, abs=0.02)
        assert set(found.unique().tolist()) == {0.0, 1.25}
    assert not torch.equal(first, second) and not torch.equal(first, later) and not torch.equal(first[0], first[1])
    assert torch.equal(first[1], alone[0])
    assert all(torch.equal(found, x) for found in masks(1, (6, 7), training=False))


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_in_narrower_formats(policy):
    ours, own = run(policy=policy), run("build", policy=policy)
    assert own.losses == pytest.approx(ours.losses, rel=1e-5 if policy == "fp32" else 2e-2)


CHAT = dict(global_batch_size=8, micro_batch_size=2, sequence_length=150)


@cache
def run_on_replies(function: str | None, layout: tuple = ()):
    """Two steps on conversations of which only replies are targets, one in each sequence."""
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
            "ModelParts(block=lambda index: torch.nn.Dropout2d(0.1))",
            r"layers.0 \(Dropout2d\) drops by torch's random numbers",
        ),
        (
            "torch.nn.functional.dropout(x, 0.1)",
            PARTS,
            r"wrong.py, line 9, in forward.*draws torch's random numbers",
        ),
        (
            "torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)",
            PARTS,
            r"wrong.py, line 9, in forward.*draws torch's random numbers",
        ),
    ],
    ids=["in-forward", "in-build", "no-parts", "wrong-shape", "wrong-name", "dropout", "function", "attention"],
)
def test_an_error_names_the_users_line(tmp_path, forward, parts, words):
    (tmp_path / "wrong.py").write_text(WRONG.format(forward=forward, parts=parts))
    with pytest.raises(UserError, match=words):
        train_in_threads(model=dict(module=f"{tmp_path / 'wrong.py'}:build"), steps=1)


def test_what_cannot_apply_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="names no function"):
        make_config(model=dict(module="a"))
    with pytest.raises(ConfigError, match="model.hidden_dropout(.|\n)*where they have a torch.nn.Dropout"):
        make_config(model=dict(module="a:b", hidden_dropout=0.1))
    (tmp_path / "plain.py").write_text(WRONG.format(forward="self.linear(x)", parts=PARTS))
    plain = dict(module=f"{tmp_path / 'plain.py'}:build")
    with pytest.raises(UserError, match="names no modules to recompute: return ModelParts"):
        train_in_threads(model=plain, parallel=dict(recompute="selective"), steps=1)
    with pytest.raises(UserError, match=r"data.document_mask: Block.forward of model.module .* takes no `documents`"):
        train_in_threads(model=plain, data=dict(document_mask=True), steps=1)


def test_a_weight_of_a_single_number_is_refused(tmp_path):
    code = WRONG.format(forward="self.scale * self.linear(x)", parts=PARTS)
    scale = "self.scale = torch.nn.Parameter(torch.{})"
    for name, value in (("number", "tensor(1.0)"), ("vector", "ones(1)")):
        made = code.replace("Linear(32, 32)", f"Linear(32, 32)\n        {scale.format(value)}")
        (tmp_path / f"{name}.py").write_text(made)
    train_in_threads(model=dict(module=f"{tmp_path / 'vector.py'}:build"), steps=1)
    with pytest.raises(UserError, match=r"layers.0.scale is a single number: give it a dimension"):
        train_in_threads(model=dict(module=f"{tmp_path / 'number.py'}:build"), steps=1)


def test_a_dropout_is_declared_where_activations_may_be_divided(tmp_path):
    """With one rank it has all of them."""
    code = WRONG.format(
        forward="self.linear(x)", parts=PARTS.replace("Block()", "Block(), shardings=dict(linear=Row())")
    )
    code = code.replace("import Column", "import Row").replace("import Row, ", "import Row, Column, ")
    (tmp_path / "drops.py").write_text(code.replace("(32, 32)", "(32, 32)\n        self.drop = torch.nn.Dropout(0.1)"))
    start = partial(train_in_threads, model=dict(module=f"{tmp_path / 'drops.py'}:build"), steps=1)
    start()
    with pytest.raises(UserError, match=r"layers.\d.drop is a Dropout, and shardings must say(.|\n)*Divided\(dim\)"):
        start(parallel=dict(tp_size=2))
