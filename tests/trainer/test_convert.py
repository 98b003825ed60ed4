"""launch/convert.py on checkpoints of real layouts: transformers computes the same function, and nothing is lost on the
way there and back; and runs that begin with such weights."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from parallel3d.checkpoint.average import average
from parallel3d.checkpoint.directory import verify_checkpoint
from parallel3d.checkpoint.index import RunFacts
from parallel3d.checkpoint.read import CheckpointReader, load_weight
from parallel3d.checkpoint.weights import write_weights
from parallel3d.commands.convert import main
from parallel3d.config.load import load_config
from parallel3d.errors import CheckpointError, ConfigError
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.parameter import parameters_of
from parallel3d.layers.placement import LayerContext
from parallel3d.models import hf_export
from parallel3d.models.initial_weights import (
    check_initial_weights,
    find_checkpoint,
    open_initial_weights,
    read_model_config,
    resolve_initial_weights,
)
from parallel3d.models.make import make_decoder
from parallel3d.parallel.group import SoloGroup
from parallel3d.parallel.sharding import UNSHARDED
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.precision.policy import POLICIES
from tests.support import tiny_runs
from tests.support.family_shapes import FAMILY_SHAPES
from tests.support.saved_layouts import assert_equal, read_all, run_layout, save

SEQ = 16
MODELS = {
    "llama": dict(num_key_value_heads=2),
    "llama-tied": dict(tie_word_embeddings=True, rope_theta=500.0),
    "smollm2": dict(tie_word_embeddings=True, num_key_value_heads=2),
    "qwen2": dict(qkv_bias=True, rms_norm_eps=1e-6),
    **FAMILY_SHAPES,
    "mistral": dict(architecture="mistral", num_key_value_heads=2, sliding_window=5),
    "gpt2": dict(architecture="gpt2", tie_word_embeddings=True, max_position_embeddings=32),
    "gpt2-untied": dict(architecture="gpt2", activation_function="gelu", qkv_bias=False),
}
LAYOUT = dict(tp_size=2, pp_size=2, dp_size=2)
OTHER = dict(tp_size=4, pp_size=1, dp_size=1)


def config_of(name, parallel, policy="fp32", **run):
    batch = dict(global_batch_size=4, micro_batch_size=1, sequence_length=SEQ)
    model = dict(initializer_range=0.2, **MODELS[name])
    return tiny_runs.make_config(model=model, parallel=parallel, precision=dict(policy=policy), batch=batch, run=run)


def convert(capsys, *arguments):
    """(exit code, what is printed, what is complained of)"""
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """By model and policy: a checkpoint of a step on LAYOUT."""
    made = {}

    def make(name, policy="fp32"):
        if (name, policy) not in made:
            _, snapshots, runtimes = run_layout(config_of(name, LAYOUT, policy), steps=1)
            folder = tmp_path_factory.mktemp(f"{name}-{policy}")
            made[name, policy] = save(folder, snapshots, runtimes[0])
        return made[name, policy]

    return make


def our_logits(folder, tokens):
    """Logits (batch * seq, vocab) of a checkpoint's weights by our model, in fp32."""
    index = verify_checkpoint(folder)
    config = config_of("llama", {}).model_validate(index.facts.config).model
    context = LayerContext(tp=TensorParallel(group=SoloGroup()), policy=POLICIES["fp32"])
    model = make_decoder(config, range(config.num_hidden_layers), num_positions=SEQ, context=context)
    reader = CheckpointReader(folder, index)
    with torch.no_grad():
        for parameter in parameters_of(model):
            parameter.copy_(load_weight(reader, parameter.sharding, tp=UNSHARDED))
    return model.logits(tokens.view(-1), MicroBatch(seed=1, iteration=1, slots=(0, 1), sequence_length=SEQ))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_and_the_way_back_is_exact(tmp_path, capsys, checkpoint, name):
    from transformers import AutoModelForCausalLM  # takes seconds to import

    source, folder = checkpoint(name), tmp_path / "hf"
    code, out, err = convert(capsys, "to-hf", source, folder, "--max-file-gb", "0.00002")
    assert code == 0, err
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2 and (folder / "model.safetensors.index.json").exists()
    assert all(file.name in out for file in files)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert theirs.dtype == torch.float32
    tokens = torch.randint(257, (2, SEQ), generator=torch.Generator().manual_seed(1))
    expected = our_logits(source, tokens)
    with torch.no_grad():
        logits = theirs(tokens).logits.flatten(0, 1)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()

    code, out, err = convert(capsys, "from-hf", folder, tmp_path / "back")
    assert code == 0, err
    ours = {key: value for key, value in read_all(source).items() if key[0] == "weight"}
    assert_equal(read_all(tmp_path / "back"), ours)
    code, out, err = convert(capsys, "to-hf", tmp_path / "back", tmp_path / "hf2", "--max-file-gb", "0.00002")
    assert code == 0, err
    assert contents(tmp_path / "hf2") == contents(folder)


def contents(folder):
    """Returns the contents of a folder's files, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "policy, asked, dtype",
    [("bf16_sr", "keep", "BF16"), ("bf16", "keep", "F32"), ("bf16", "bf16", "BF16"), ("bf16_sr", "fp32", "F32")],
)
def test_formats(tmp_path, capsys, checkpoint, policy, asked, dtype):
    """Master weights are what is exported where there are any."""
    source = checkpoint("llama", policy)
    assert convert(capsys, "to-hf", source, tmp_path / "hf", "--dtype", asked)[0] == 0
    wanted = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        key = "model.layers.1.self_attn.v_proj.weight"
        assert torch.equal(file.get_tensor(key), read_all(source)["weight", "layers.1.attention.v.weight"].to(wanted))
        assert file.get_tensor(key).dtype == wanted
    fields = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert fields["torch_dtype"] == str(wanted).removeprefix("torch.")


# --- runs that begin with them ----------------------------------------------------------------------------------------


def begin(folder, config):
    """Weights and moments of a run's ranks before the first step."""
    _, snapshots, runtimes = run_layout(config, initial=open_initial_weights(config))
    return read_all(save(folder, snapshots, runtimes[0], step=1))


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", ["fp32", "bf16_sr"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_every_layout_begins_with_the_folders_weights(tmp_path, capsys, checkpoint, name, policy):
    """From a Hugging Face folder or from a checkpoint; tp 4 on 2 key heads shares them. Moments begin at zero."""
    source = checkpoint(name)
    convert(capsys, "to-hf", source, tmp_path / "hf")
    wanted = {key: value.to(POLICIES[policy].state) for key, value in read_all(source).items()}
    wanted |= {key: torch.zeros_like(value) for key, value in wanted.items() if key[0] != "weight"}
    for number, (parallel, folder) in enumerate(product(({}, LAYOUT, OTHER), (tmp_path / "hf", source))):
        config = config_of(name, parallel, policy, initialize_from=str(folder))
        check_initial_weights(config)
        assert_equal(begin(tmp_path / str(number), config), wanted)


def test_a_run_from_weights_is_the_same_run_on_any_layout(tmp_path, checkpoint):
    """Steps after it: what was read is what is trained, moments begin at zero."""
    runs = []
    for parallel in ({}, LAYOUT):
        config = config_of("llama", parallel, "fp64", initialize_from=str(checkpoint("llama")))
        runs.append(run_layout(config, initial=open_initial_weights(config), steps=2)[0])
    for name, weight in runs[0].items():
        assert (weight - runs[1][name]).abs().max() < 1e-10, name


def test_another_model_is_refused_with_all_that_differs(tmp_path, capsys, checkpoint):
    convert(capsys, "to-hf", checkpoint("llama"), tmp_path / "hf")
    for folder in (tmp_path / "hf", checkpoint("llama")):
        config = config_of("qwen2", {}, initialize_from=str(folder))
        with pytest.raises(ConfigError) as caught:
            check_initial_weights(config)
        said = str(caught.value)
        assert "4 problems" not in said and "3 problems" in said
        assert "model.num_key_value_heads = 4" in said and "belong to a model with 2. Set it to 2" in said
        assert "model.qkv_bias = True" in said and "model.rms_norm_eps = 1e-06" in said


def test_the_section_that_is_printed_is_the_one_that_fits(tmp_path, capsys, checkpoint):
    for name in ("llama", "gpt2"):
        convert(capsys, "to-hf", checkpoint(name), tmp_path / name)
        code, out, _ = convert(capsys, "model", tmp_path / name)
        rest = {"batch": dict(global_batch_size=4, micro_batch_size=1, sequence_length=SEQ)}
        rest |= {"optimizer": {"learning_rate": 1e-3}, "run": {"num_steps": 1, "initialize_from": str(tmp_path / name)}}
        (tmp_path / "config.json").write_text(json.dumps(json.loads(out) | rest))
        check_initial_weights(load_config(tmp_path / "config.json"))
        assert code == 0 and f'"architecture": "{name}"' in out


def test_a_checkpoint_of_weights_alone_is_no_place_to_go_on_from(tmp_path, capsys, checkpoint):
    convert(capsys, "to-hf", checkpoint("llama"), tmp_path / "hf")
    convert(capsys, "from-hf", tmp_path / "hf", tmp_path / "weights")
    with pytest.raises(CheckpointError, match="holds weights only"):
        run_layout(config_of("llama", {}), start=tmp_path / "weights")


# --- mistakes, accidents, memory --------------------------------------------------------------------------------------


def test_mistakes(tmp_path, capsys, checkpoint):
    source = checkpoint("llama")
    (tmp_path / "there").mkdir()
    for arguments, said in (
        (("to-hf", tmp_path, tmp_path / "hf"), "neither a checkpoint nor the folder of a run that has one"),
        (("to-hf", source, tmp_path / "there"), "there exists: nothing is overwritten"),
        (("to-hf", source, tmp_path / "hf", "--tokenizer", tmp_path / "no.model"), "no.model: can't be read"),
        (("from-hf", tmp_path, tmp_path / "back"), "config.json can't be read"),
        (("from-hf", source, tmp_path / "back"), "config.json can't be read"),
        (("model", tmp_path), "config.json can't be read"),
    ):
        code, out, err = convert(capsys, *arguments)
        assert code == 2 and re.search(said, err), (arguments, out, err)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path, capsys, checkpoint):
    source = Path(str(tmp_path / "copy"))
    source.mkdir()
    for path in checkpoint("llama").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    shard = sorted(source.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    code, _, err = convert(capsys, "to-hf", source, tmp_path / "hf")
    assert code == 2 and f"{shard} is damaged" in err and not (tmp_path / "hf").exists()


def test_the_newest_of_a_run_is_found(tmp_path, checkpoint):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (run / "metrics.jsonl").write_text("")
    os.symlink(checkpoint("llama"), run / "checkpoints" / "latest")
    for path in (run, run / "checkpoints", run / "checkpoints" / "latest", checkpoint("llama")):
        assert find_checkpoint(path) == checkpoint("llama").resolve()
        config = resolve_initial_weights(config_of("llama", {}, initialize_from=str(path)))
        assert config.run.initialize_from == str(checkpoint("llama").resolve())
        check_initial_weights(config)
    assert find_checkpoint(tmp_path) is None


def test_the_newest_of_a_run_with_a_checkpoint_directory_of_its_own(tmp_path, checkpoint):
    run, directory = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    directory.mkdir()
    (run / "config.json").write_text(json.dumps({"checkpoint": {"directory": str(directory)}}))
    (run / "environment.json").write_text("{}")
    os.symlink(checkpoint("llama"), directory / "latest")
    assert find_checkpoint(run) == checkpoint("llama").resolve()
    assert read_model_config(find_checkpoint(run)).architecture == "llama"
    (directory / "latest").unlink()
    assert find_checkpoint(run) is None
    with pytest.raises(CheckpointError, match=f"{run} is a run without a checkpoint, in {directory}: "):
        read_model_config(run)


@pytest.mark.parametrize(
    "error, code, said",
    [
        (
            OSError(28, "No space left on device", "model-00002"),
            2,
            r"can't write model-00002 \(No space left on",
        ),
        (KeyboardInterrupt(), 130, "stopped; nothing was written"),
    ],
)
def test_what_ends_it_early_leaves_nothing(tmp_path, capsys, checkpoint, monkeypatch, error, code, said):
    """A disk that is full at the second file; Ctrl-C."""

    class EndingDisk(hf_export.Disk):
        def create(self, path):
            if "00002" in path.name:
                raise error
            return super().create(path)

    monkeypatch.setattr(hf_export, "Disk", EndingDisk)
    ended, _, err = convert(capsys, "to-hf", checkpoint("llama"), tmp_path / "hf", "--max-file-gb", "0.00002")
    assert ended == code and re.search(said, err)
    assert list(tmp_path.iterdir()) == []


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def test_a_folders_own_tokenizer_comes_back_as_it_was(tmp_path, capsys, checkpoint):
    convert(capsys, "to-hf", checkpoint("llama"), tmp_path / "hf")
    files = {
        "tokenizer.json": b"{}",
        "vocab.json": b'{"a": 1}',
        "merges.txt": b"a b",
        "chat_template.jinja": b"{{ x }}",
    }
    for name, data in files.items():
        (tmp_path / "hf" / name).write_bytes(data)
    ids = {"bos_token_id": 7, "eos_token_id": [8, 9], "temperature": 0.6}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(ids))
    convert(capsys, "from-hf", tmp_path / "hf", tmp_path / "back")
    average([tmp_path / "back"], tmp_path / "mean")  # as every tool leaves it
    code, _, err = convert(capsys, "to-hf", tmp_path / "mean", tmp_path / "hf2")
    assert code == 0, err
    assert {name: (tmp_path / "hf2" / name).read_bytes() for name in files} == files
    assert json.loads((tmp_path / "hf2" / "generation_config.json").read_text()) == ids
    config = json.loads((tmp_path / "hf2" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (7, [8, 9])


MEASURED = """
import re, sys
from pathlib import Path
from parallel3d.commands.convert import main
def memory(name): return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")  # resets the peak: imports had their own
before = memory("VmRSS")
assert main(sys.argv[1:]) == 0
print(memory("VmHWM") - before, file=sys.stderr)
"""


@pytest.mark.full
def test_memory_is_that_of_a_few_tensors(tmp_path):
    """130 MB in tensors of at most 8 MB; pages of files that are mapped count, too. A tensor and the one before it take
    17 MB, the allocator perhaps as much again; files that stay mapped take 143 MB. Under our own names, gate and up are
    one tensor: with the one before it and the part that is read 42 MB, 45 to 72 with the allocator's."""
    vocab, hidden, inner, layers = 2048, 1024, 2048, 3
    sizes = dict(vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers)
    model = config_of("llama-tied", {}).model.model_copy(update=sizes)
    square, wide = (hidden, hidden), (inner, hidden)
    shapes = {"embedding.weight": (vocab, hidden), "final_norm.weight": (hidden,)}
    for layer in range(layers):
        parts = {f"attention.{part}": square for part in ("q", "k", "v", "output")}
        parts |= {"mlp.gate": wide, "mlp.up": wide, "mlp.down": wide[::-1]}
        parts |= {"attention_norm": (hidden,), "mlp_norm": (hidden,)}
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    tensors = {name: ("F32", shape) for name, shape in shapes.items()}
    chunks = (memoryview(bytes(4 * torch.Size(shape).numel())) for shape in shapes.values())
    facts = RunFacts(state={}, config={"model": model.model_dump()})
    index = write_weights(tmp_path / "ours", tensors, chunks, facts=facts, step=1)
    assert index.num_bytes > 128e6
    for *arguments, most in (
        ("to-hf", "ours", "hf", 64e6),
        ("from-hf", "hf", "back", 64e6),
        ("to-safetensors", "ours", "plain", 100e6),
    ):
        command = [sys.executable, "-c", MEASURED, arguments[0], *(str(tmp_path / name) for name in arguments[1:])]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        growth = int(done.stderr.splitlines()[-1])
        assert growth < most, f"{arguments[0]} took {growth / 1e6:.0f} MB"
