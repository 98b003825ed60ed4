"""`parallel3d convert to-safetensors`: a user's own layers, trained on any layout, as plain torch loads them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from parallel3d.checkpoint.directory import verify_checkpoint
from parallel3d.checkpoint.read import CheckpointReader, load_weight
from parallel3d.commands.convert import main
from parallel3d.config.schema import Config
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.parameter import parameters_of
from parallel3d.models.make import make_stage
from parallel3d.parallel.sharding import UNSHARDED
from parallel3d.parallel.tensor_parallel import solo_region
from tests.support import own_llama
from tests.support.saved_layouts import run_layout, save
from tests.support.tiny_runs import make_config

HERE = "tests.trainer.test_plain_export"
OWN = "tests.support.own_llama"
LENGTH = 16
TP2_PP2 = dict(tp_size=2, pp_size=2)
MODELS = {
    "divided": dict(module=f"{OWN}:build"),
    "tied": dict(module=f"{OWN}:build", tie_word_embeddings=True),
    "whole": dict(module=f"{OWN}:build_whole"),
    "normed-heads": dict(module=f"{OWN}:build_with_normed_heads"),
    "buffers": dict(module=f"{HERE}:build_with_buffers"),
}


class BlockWithBuffers(own_llama.Block):
    """Also one matrix at two places, and buffers of several formats, one of them drawn."""

    def __init__(self, model, index):
        super().__init__(model, index)
        self.into = nn.Linear(model.hidden_size, model.hidden_size, bias=False)
        self.back = nn.Linear(model.hidden_size, model.hidden_size, bias=False)
        self.back.weight = self.into.weight
        self.register_buffer("noise", torch.randn(model.hidden_size))
        self.register_buffer("kept", torch.arange(model.hidden_size) % 3 > 0)
        self.register_buffer("number", torch.tensor(index))
        self.register_buffer("phases", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)

    def forward(self, x, documents=None):
        x = super().forward(x, documents) + self.noise.to(x.dtype)
        return x + self.back(torch.where(self.kept, self.into(x), 0)) * (1 + self.number)


def build_with_buffers(model):
    return replace(own_llama.build(model), block=partial(BlockWithBuffers, model))


class Whole(nn.Module):
    """The user's own model on one process, with plain layers in the place of those that the framework has added."""

    def __init__(self, model, parts):
        super().__init__()
        self.layers = nn.ModuleList(parts.block(index) for index in range(model.num_hidden_layers))
        sizes = model.vocab_size, model.hidden_size
        self.embedding = parts.embedding() if parts.embedding else nn.Embedding(*sizes)
        self.final_norm = nn.Identity() if parts.head else nn.RMSNorm(model.hidden_size, eps=model.rms_norm_eps)
        self.head = parts.head() if parts.head else nn.Linear(*reversed(sizes), bias=False)
        if model.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.final_norm(x))


def config_of(name: str, parallel=None, policy: str = "fp64"):
    model = dict(num_key_value_heads=2, **MODELS[name])
    return make_config(model=model, parallel=parallel or {}, precision=dict(policy=policy), run=dict(seed=7))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By model: a checkpoint of two steps on tp2 x pp2, and the weights that its ranks hold together."""
    made = {}

    def make(name, policy="fp64"):
        if (name, policy) not in made:
            weights, snapshots, runtimes = run_layout(config_of(name, TP2_PP2, policy), steps=2)
            made[name, policy] = save(tmp_path_factory.mktemp(name), snapshots, runtimes[0]), weights
        return made[name, policy]

    return make


def export(capsys, *arguments) -> str:
    code = main(["to-safetensors", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "config.json"}


@pytest.mark.parametrize("name", MODELS)
def test_a_users_own_module_loads_it_and_computes_the_same(tmp_path, capsys, trained, name):
    """In fp64, so that only the order of sums differs."""
    source, weights = trained(name)
    export(capsys, source, tmp_path / "plain")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() >= weights.keys()
    assert all(torch.equal(found[key], weight) for key, weight in weights.items())
    assert [key for key in found.keys() - weights.keys() if name != "buffers"] == []

    config = Config.model_validate(json.loads((tmp_path / "plain" / "config.json").read_text())["config"])
    torch.manual_seed(99)  # what is not loaded differs
    function = getattr(own_llama, MODELS[name]["module"].partition(":")[2], build_with_buffers)
    whole = Whole(config.model, function(config.model)).double()
    load_model(whole, tmp_path / "plain" / "model.safetensors")  # strict
    tokens = torch.randint(257, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            whole(tokens).flatten(0, 1), logits_of(source, config, tokens), rtol=1e-10, atol=1e-12
        )


def logits_of(folder, config, tokens):
    """(tokens, vocab) of a checkpoint's weights in the framework's own stage, under the run's seed."""
    whole = config.model_copy(update={"parallel": config_of("divided").parallel})
    stage = make_stage(whole, range(config.model.num_hidden_layers), solo_region(), torch.device("cpu"))
    reader = CheckpointReader(folder, verify_checkpoint(folder))
    with torch.no_grad():
        for parameter in parameters_of(stage):
            parameter.copy_(load_weight(reader, parameter.sharding, tp=UNSHARDED))
    micro_batch = MicroBatch(seed=1, iteration=1, slots=(0, 1), sequence_length=LENGTH, training=False)
    return stage.logits(tokens.view(-1), micro_batch)


@pytest.mark.parametrize("name", ["divided", "tied", "buffers"])
def test_the_layout_that_saved_it_leaves_no_trace(tmp_path, capsys, trained, name):
    """The same state, saved again by one process, is the same bytes."""
    source, _ = trained(name)
    _, snapshots, runtimes = run_layout(config_of(name), start=source)
    again = save(tmp_path / "again", snapshots, runtimes[0])
    assert len(list(source.glob("rank-*"))) == 4 and len(list(again.glob("rank-*"))) == 1
    for number, folder in enumerate((source, again)):
        export(capsys, folder, tmp_path / str(number))
    assert contents(tmp_path / "0") == contents(tmp_path / "1")


def test_names_formats_and_values_of_buffers(tmp_path, capsys, trained):
    """Those that state_dict would hold, a tied matrix once; the drawn one differs from block to block."""
    source, _ = trained("buffers")
    export(capsys, source, tmp_path / "plain", "--dtype", "bf16")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    model = config_of("buffers").model
    named = Whole(model, build_with_buffers(model)).state_dict().keys()
    assert found.keys() == named - {f"layers.{index}.back.weight" for index in range(4)}
    for index in range(4):
        assert found[f"layers.{index}.number"].item() == index and found[f"layers.{index}.kept"].dtype == torch.bool
        assert found[f"layers.{index}.phases"].dtype == torch.complex64
        assert found[f"layers.{index}.noise"].dtype == torch.float32
        assert found[f"layers.{index}.into.weight"].dtype == torch.bfloat16
    assert len({tuple(found[f"layers.{index}.noise"].tolist()) for index in range(4)}) == 4


def test_several_files_and_what_lies_beside_them(tmp_path, capsys, trained):
    source, weights = trained("divided")
    out = export(capsys, source, tmp_path / "plain", "--max-file-gb", "0.00004")
    index = json.loads((tmp_path / "plain" / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 2 and all(name in out for name in names)
    found = {}
    for name in names:
        part = load_file(tmp_path / "plain" / name)
        assert part.keys() == {key for key, file in index["weight_map"].items() if file == name}
        found |= part
    assert found.keys() == weights.keys() and all(torch.equal(found[key], weights[key]) for key in found)
    described = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert described["step"] == 2
    assert Config.model_validate(described["config"]) == config_of("divided", TP2_PP2)


def test_a_model_of_ours(tmp_path, capsys):
    """Under the names of our modules, fused matrices whole."""
    config = make_config(parallel=TP2_PP2)
    weights, snapshots, runtimes = run_layout(config, steps=1)
    export(capsys, save(tmp_path / "saved", snapshots, runtimes[0]), tmp_path / "plain")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    stage = make_stage(make_config(), range(4), solo_region(), torch.device("cpu"))
    assert found.keys() == weights.keys() == stage.state_dict().keys()
    assert all(torch.equal(found[key], weights[key]) for key in found)


def test_the_refusal_of_transformers_names_it(tmp_path, capsys, trained):
    source, _ = trained("divided")
    assert main(["to-hf", str(source), str(tmp_path / "hf")]) == 2
    err = capsys.readouterr().err
    assert "layers of your own" in err and "`parallel3d convert to-safetensors CHECKPOINT FOLDER`" in err


def test_mistakes(tmp_path, capsys, trained):
    source, _ = trained("divided")
    for folder, words in ((tmp_path / "none", "neither a checkpoint"), (source, "exists: nothing is overwritten")):
        assert main(["to-safetensors", str(folder), str(tmp_path)]) == 2
        assert words in capsys.readouterr().err
