"""A model trained here generates text in transformers alone, and continues training from the export."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from parallel3d.commands import train
from parallel3d.commands.convert import main
from tests.support.launch_runs import finish, metrics, start

pytestmark = pytest.mark.slow

GENERATE_SCRIPT = """
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
        "monitor": {"charts": False},
        "run": {"num_steps": 40, "threads_per_rank": 1, "directory": str(folder / "run"), "timeout_s": 300.0},
    }
    (folder / "tiny.json").write_text(json.dumps(config))
    code, out, err = finish(start("--config", folder / "tiny.json"))
    assert code == 0, out + err
    assert main(["to-hf", str(folder / "run"), str(folder / "hf")]) == 0
    return folder


@pytest.mark.full
def test_transformers_alone_generates_text(trained, tmp_path):
    """Isolated from this folder and offline. After 40 steps it knows indentation, if not much else."""
    command = [sys.executable, "-I", "-c", GENERATE_SCRIPT, str(trained / "hf"), "def f(self):\n    return"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["foreign"] == []
    assert said["text"].startswith("def f(self):\n    return") and len(said["text"]) > len("def f(self):\n    return")


def changes(trained, run, weights, *more):
    """A step of another run on another layout, from the weights in a folder."""
    fields = [f"run.directory={run}", f"run.initialize_from={weights}", "run.num_steps=1", "parallel.pp_size=1"]
    tokenizer = f"data.tokenizer.path={trained / 'hf' / 'tokenizer.model'}"
    return ["--config", str(trained / "tiny.json"), *fields, tokenizer, *more]


@pytest.mark.full
def test_a_run_begins_where_another_ended(trained, tmp_path):
    run, weights = tmp_path / "run", trained / "hf"
    code, out, err = finish(start(*changes(trained, run, weights)))
    assert code == 0 and f"run.initialize_from {weights} provides the initial weights" in out, out + err
    before = [line["loss"] for line in metrics(trained / "run")]
    assert metrics(run)[0]["loss"] < before[0] - 0.7 * (before[0] - before[-1])
    code, out, err = finish(start(*changes(trained, run, weights, "run.resume=auto", "run.num_steps=2")))
    assert code == 0 and "is not read: the run resumes from its checkpoint" in out, out + err


@pytest.mark.full
def test_a_folder_in_place_of_a_file_trains_from_its_weights(trained, tmp_path, text, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fields = ["parallel.tp_size=2", "parallel.pp_size=2", "batch.sequence_length=64", "batch.global_batch_size=8"]
    run = tmp_path / "runs" / "hf"
    code, out, err = finish(start("--config", trained / "hf", f'data.sources=["{text}"]', "run.num_steps=2", *fields))
    assert code == 0, out + err
    assert "from these weights" in err and "(1 x the text)" in err and f"convert config {trained / 'hf'} {text}" in err
    before = [line["loss"] for line in metrics(trained / "run")]
    assert metrics(run)[0]["loss"] < before[0] - 0.7 * (before[0] - before[-1])
    config = json.loads((run / "config.json").read_text())
    assert config["run"]["initialize_from"] == str(trained / "hf") and config["data"]["sources"] == [str(text)]


def copy(source, target):
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.full
def test_weights_that_do_not_fit_are_refused_before_any_worker_starts(trained, tmp_path, capsys):
    damaged = copy(trained / "run" / "checkpoints" / "latest", tmp_path / "damaged")
    shard = sorted(damaged.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    for weights, more, said in (
        (trained / "hf", ["model.hidden_size=64"], "model.hidden_size = 64: the weights in run.initialize_from"),
        (tmp_path / "nowhere", [], "is not a directory"),
        (tmp_path, [], "config.json can't be read"),
        (damaged, [], f"{shard.name} is damaged"),
    ):
        assert train.main(changes(trained, tmp_path / "run", weights, *more)) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_tensor_that_is_missing_is_named_once(trained, tmp_path):
    broken = copy(trained / "hf", tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors")
    code, out, err = finish(start(*changes(trained, tmp_path / "run", broken)))
    assert code == 2 and (out + err).count("lacks model.layers.1.mlp.up_proj.weight") == 1
    assert "Traceback" not in out + err
