"""A user's own layers whose constructor computes with values, which the device "meta" has not: commands that ask for
shapes alone build them too, one block at a time."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from parallel3d import ModelParts
from parallel3d.commands import generate, plan
from parallel3d.errors import UserError
from parallel3d.inprocess.loaded_ranks import load_weights
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.models.initial_weights import open_weights
from parallel3d.models.make import make_stage, shardings_of
from parallel3d.parallel.tensor_parallel import solo_region
from tests.support import own_llama
from tests.support.saved_layouts import run_layout, save
from tests.support.tiny_runs import make_config

HERE = "tests.models.test_values_in_constructors"
LAYERS = 4
built: list[weakref.ref[nn.Parameter]] = []
"""The weights of the blocks, and those that were alive when the next one was made."""
most_alive = 0


class Block(nn.Module):
    """Needs values in the three ways that users have tried."""

    def __init__(self, model, index):
        super().__init__()
        global most_alive
        most_alive = max(most_alive, sum(ref() is not None for ref in built))
        rates = torch.linspace(0, 0.3, model.num_hidden_layers).tolist()
        width = int(torch.tensor(model.hidden_size * 1.5).item())
        self.norm = nn.RMSNorm(model.hidden_size)
        self.wide = nn.Linear(model.hidden_size, width)
        self.narrow = nn.Linear(width, model.hidden_size)
        self.scale = 1 - rates[index]
        self.extra = nn.Linear(model.hidden_size, model.hidden_size) if torch.ones(index).sum() > 0 else None
        built.append(weakref.ref(self.wide.weight))

    def forward(self, x):
        x = x + self.scale * self.narrow(self.wide(self.norm(x)).relu())
        return x if self.extra is None else x + self.extra(x)


def build(model):
    return ModelParts(block=partial(Block, model))


class BlockThatFails(Block):
    def __init__(self, model, index):
        super().__init__(model, index)
        self.missing = [1.0, 2.0][torch.tensor(7).item()]


def build_that_fails(model):
    return ModelParts(block=partial(BlockThatFails, model))


class BlockThatDraws(own_llama.Block):
    def __init__(self, model, index):
        super().__init__(model, index)
        self.register_buffer("noise", 3 * torch.randn(model.hidden_size))

    def forward(self, x):
        return super().forward(x) * self.noise


def build_that_draws(model):
    return replace(own_llama.build(model), block=partial(BlockThatDraws, model))


def config_of(function: str, **sections):
    tokenizer = dict(kind="bytes")
    return make_config(model=dict(module=f"{HERE}:{function}"), data=dict(tokenizer=tokenizer), **sections)


def test_shapes_are_known_and_one_block_is_built_at_a_time():
    built.clear()
    shardings = {sharding.name: sharding.shape for sharding in shardings_of(config_of("build").model)}
    assert shardings["layers.3.wide.weight"] == (48, 32)
    assert {name for name in shardings if "extra" in name} == {
        f"layers.{index}.extra.{part}" for index in (1, 2, 3) for part in ("weight", "bias")
    }
    assert len(built) == LAYERS and most_alive == 0


def test_an_error_that_values_do_not_mend_names_the_users_line():
    with pytest.raises(UserError, match=r"test_values_in.*, in __init__ \(self.missing = .*IndexError: list index out"):
        shardings_of(config_of("build_that_fails").model)


@pytest.mark.parametrize("function", ["build", "build_that_draws"])
def test_generate_knows_the_model(tmp_path, capsys, function):
    """With the buffers that the run has drawn, under its seed."""
    config = config_of(function, run=dict(seed=7), precision=dict(policy="fp32"))
    _, snapshots, runtimes = run_layout(config, steps=1)
    folder = save(tmp_path, snapshots, runtimes[0])
    assert generate.main([str(folder), "a", "--max-tokens", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tokens"]
    assert len(found) > 2 and found == greedy(config, folder, ord("a"), len(found))


def greedy(config, folder, first: int, number: int) -> list[int]:
    """The likeliest tokens after `first`, by the stage that trains."""
    stage = make_stage(config, range(config.model.num_hidden_layers), solo_region(), torch.device("cpu"))
    load_weights(stage, open_weights(folder), solo_region())
    tokens = [first]
    for _ in range(number):
        micro_batch = MicroBatch(seed=1, iteration=1, slots=(0,), sequence_length=len(tokens), training=False)
        tokens.append(int(stage.logits(torch.tensor(tokens), micro_batch)[-1].argmax()))
    return tokens[1:]


@pytest.mark.parametrize("options", [["--devices", "1xH100-80GB:8"], ["--device", "H100"]])
def test_plan_knows_the_model(tmp_path, capsys, options):
    config = config_of("build", precision=dict(policy="bf16"), run=dict(num_steps=10))
    (tmp_path / "config.json").write_text(config.model_dump_json())
    code = plan.main(["--config", str(tmp_path / "config.json"), *options])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "H100" in said.out
