"""convert to-safetensors: the weights of a user's own layers, and of ours, by the names that they have in the model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel3d.checkpoint.directory import verify_checkpoint
from parallel3d.checkpoint.read import CheckpointReader, load_weight
from parallel3d.commands.convert import main
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.parameter import parameters_of
from parallel3d.layers.placement import LayerContext
from parallel3d.models.make import make_decoder
from parallel3d.models.plain_export import RUN_CONFIG
from parallel3d.parallel.group import SoloGroup
from parallel3d.parallel.sharding import UNSHARDED
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.precision.policy import POLICIES
from tests.support import own_llama
from tests.support.saved_layouts import read_all, run_layout, save
from tests.support.tiny_runs import make_config

LAYOUT = dict(tp_size=2, pp_size=2)
BATCH, LENGTH = 2, 16


def config_of(function: str | None):
    module = function and f"tests.support.own_llama:{function}"
    return make_config(
        model=dict(num_key_value_heads=2, module=module),
        parallel=LAYOUT,
        precision=dict(policy="fp32"),
        batch=dict(global_batch_size=4, micro_batch_size=1, sequence_length=LENGTH),
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """By the function that makes the layers: a checkpoint after a step on LAYOUT."""

    @cache
    def make(function: str | None) -> Path:
        _, snapshots, runtimes = run_layout(config_of(function), steps=1)
        return save(tmp_path_factory.mktemp("checkpoint"), snapshots, runtimes[0])

    return make


def exported(capsys, source: Path, folder: Path, *flags: str) -> dict[str, torch.Tensor]:
    """The tensors of all files that the command writes."""
    assert main(["to-safetensors", str(source), str(folder), *flags]) == 0, capsys.readouterr().err
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@torch.no_grad()
def logits_of(source: Path, tokens: torch.Tensor) -> torch.Tensor:
    """(tokens, vocabulary) by the framework, from the checkpoint itself."""
    model = config_of("build_whole").model_validate(verify_checkpoint(source).facts.config).model
    context = LayerContext(tp=TensorParallel(group=SoloGroup()), policy=POLICIES["fp32"])
    stage = make_decoder(model, range(model.num_hidden_layers), num_positions=LENGTH, context=context)
    reader = CheckpointReader(source, verify_checkpoint(source))
    for parameter in parameters_of(stage):
        parameter.copy_(load_weight(reader, parameter.sharding, tp=UNSHARDED))
    slots = tuple(range(BATCH))
    return stage.logits(tokens.view(-1), MicroBatch(seed=1, iteration=1, slots=slots, sequence_length=LENGTH))


@torch.no_grad()
def test_a_users_modules_load_their_weights_and_compute_the_same(tmp_path, capsys, checkpoint):
    """In plain torch, without the framework: every name is the module's own, and none is missing."""
    source = checkpoint("build_whole")
    weights = exported(capsys, source, tmp_path / "plain", "--max-file-gb", "0.00002")
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) > 2
    index = json.loads((tmp_path / "plain" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    model = config_of("build_whole").model
    parts = own_llama.build_whole(model)
    modules = {"embedding": parts.embedding()}
    modules |= {f"layers.{number}": parts.block(number) for number in range(model.num_hidden_layers)}
    modules |= {"head": parts.head()}
    for name, module in modules.items():
        own = {each.removeprefix(f"{name}."): value for each, value in weights.items() if each.startswith(f"{name}.")}
        module.load_state_dict(own)  # strict
    tokens = torch.randint(257, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    x = tokens
    for module in modules.values():
        x = module(x)
    expected = logits_of(source, tokens)
    assert (x.flatten(0, 1) - expected).abs().max() < 1e-5 * expected.abs().max()


def rows_of(tensors: Iterable[torch.Tensor]) -> Counter[bytes]:
    """The bytes of each row: fused weights have the rows of the tensors that they are stored as."""
    return Counter(row.numpy().tobytes() for tensor in tensors for row in tensor)


@pytest.mark.parametrize("function", [None, "build"])
def test_no_bit_and_no_tensor_is_lost(tmp_path, capsys, checkpoint, function):
    source = checkpoint(function)
    weights = exported(capsys, source, tmp_path / "plain")
    stored = {name: torch.as_tensor(value) for (kind, name), value in read_all(source).items() if kind == "weight"}
    assert rows_of(weights.values()) == rows_of(stored.values())
    unfused = weights.keys() & stored.keys()
    assert len(unfused) > len(weights) / 2 and all(torch.equal(weights[name], stored[name]) for name in unfused)
    facts = json.loads((tmp_path / "plain" / RUN_CONFIG).read_text())
    assert facts["step"] == 1 and facts["config"]["model"]["hidden_size"] == config_of(function).model.hidden_size


def test_another_format_and_what_is_refused(tmp_path, capsys, checkpoint):
    source = checkpoint("build")
    weights = exported(capsys, source, tmp_path / "plain", "--dtype", "bf16")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert main(["to-safetensors", str(source), str(tmp_path / "plain")]) == 2
    assert "exists: nothing is overwritten" in capsys.readouterr().err
    assert main(["to-hf", str(source), str(tmp_path / "hf")]) == 2
    assert "convert to-safetensors" in capsys.readouterr().err
