"""A model trained here speaks through transformers alone, and trains on from what was exported."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file
from test_train import finish, metrics, start

from launch.convert import main

pytestmark = pytest.mark.slow

SPEAK = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompt = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer(prompt, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0].tolist()
foreign = sorted({"parallel3d", "models", "launch"} & {name.split(".")[0] for name in sys.modules})
print(json.dumps({"ids": output, "text": tokenizer.decode(output, skip_special_tokens=True), "foreign": foreign}))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text, cache):
    """The run's folder, the exported folder and the configuration of a short run."""
    folder = tmp_path_factory.mktemp("trained")
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = {
        "model": {"vocab_size": 512, "tie_word_embeddings": True, **sizes},
        "parallel": {"pp_size": 2, "dp_size": 2},
        "batch": {"global_batch_size": 8, "micro_batch_size": 1, "sequence_length": 64},
        "optimizer": {"learning_rate": 2e-2},
        "data": {"sources": [str(text)], "cache_directory": str(cache)},
        "run": {"num_steps": 40, "threads_per_rank": 1, "directory": str(folder / "run"), "timeout_s": 60.0},
    }
    (folder / "tiny.json").write_text(json.dumps(config))
    code, out, err = finish(start("--config", folder / "tiny.json"))
    assert code == 0, out + err
    assert main(["to-hf", str(folder / "run"), str(folder / "hf")]) == 0
    return folder


def test_transformers_alone_generates_text(trained, tmp_path):
    """Isolated from this folder and offline. After 40 steps it knows indentation, if not much else."""
    command = [sys.executable, "-I", "-c", SPEAK, str(trained / "hf"), "def f(self):\n    return"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["foreign"] == []
    assert said["text"].startswith("def f(self):\n    return") and len(said["text"]) > len("def f(self):\n    return")


def begin(trained, run, weights, *more):
    """A step of another run on another layout, from the weights in a folder."""
    changes = [f"run.directory={run}", f"run.initialize_from={weights}", "run.num_steps=1", "parallel.pp_size=1"]
    tokenizer = f"data.tokenizer.path={trained / 'hf' / 'tokenizer.model'}"
    return finish(start("--config", trained / "tiny.json", *changes, tokenizer, *more))


def test_a_run_begins_where_another_ended(trained, tmp_path):
    losses = []
    for name, weights in (("hf", trained / "hf"), ("own", trained / "run" / "checkpoints" / "latest")):
        code, out, err = begin(trained, tmp_path / name, weights)
        assert code == 0 and f"run.initialize_from {weights} gives the weights to begin with" in out, out + err
        losses.append(metrics(tmp_path / name)[0]["loss"])
    before = [line["loss"] for line in metrics(trained / "run")]
    assert losses[0] == losses[1]
    assert losses[0] < before[0] - 0.7 * (before[0] - before[-1])
    code, out, err = begin(trained, tmp_path / "own", trained / "hf", "run.resume=auto", "run.num_steps=2")
    assert code == 0 and "is not read: the run goes on from its checkpoint" in out, out + err


def test_what_does_not_fit_is_told_before_any_step(trained, tmp_path):
    code, out, err = begin(trained, tmp_path / "run", trained / "hf", "model.hidden_size=64")
    assert code == 2 and "model.hidden_size = 64" in err and "Set it to 32" in err and "Traceback" not in out + err
    code, out, err = begin(trained, tmp_path / "run", tmp_path / "nowhere")
    assert code == 2 and "run.initialize_from" in err and "is no folder" in err
    (tmp_path / "broken").mkdir()
    for path in (trained / "hf").iterdir():
        (tmp_path / "broken" / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "broken" / "model.safetensors")
    code, out, err = begin(trained, tmp_path / "run", tmp_path / "broken")
    assert code == 2 and "lacks model.layers.1.mlp.up_proj.weight" in out + err and "Traceback" not in out + err
    shard = sorted((trained / "run" / "checkpoints" / "latest").glob("*.safetensors"))[0]
    (tmp_path / "damaged").mkdir()
    for path in shard.parent.iterdir():
        (tmp_path / "damaged" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "damaged" / shard.name).write_bytes(shard.read_bytes()[:-1] + b"x")
    code, out, err = begin(trained, tmp_path / "run", tmp_path / "damaged")
    assert code == 2 and f"{shard.name} is damaged" in err and "Traceback" not in out + err
