"""Configurations to begin with: `parallel3d convert config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel3d.commands.convert import main
from parallel3d.commands.parsers import parse
from parallel3d.config import derived
from parallel3d.config.load import load_config, resolve
from parallel3d.config.schema import ModelConfig
from parallel3d.config.shipped import shipped_configs
from parallel3d.config.starter import nearest_size, num_sequences, starter_config
from tests.support.hf_tokenizers import write_folder

HF_LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def model_of(name: str) -> ModelConfig:
    return resolve(load_config(shipped_configs()[name]), config_path="x.json").model


@pytest.mark.parametrize(
    ("name", "step_tokens", "learning_rate"),
    [("gpt3_125m", 2**19, 6e-4), ("hlat_7b", 2**21, 1.2e-4), ("hlat_70b", 2**21, 0.6e-4)],
)
def test_sizes_are_those_of_gpt3(tmp_path: Path, name: str, step_tokens: int, learning_rate: float):
    raw = starter_config(model_of(name))
    (tmp_path / "mine.json").write_text(json.dumps(raw))
    config = resolve(load_config(tmp_path / "mine.json"), config_path="mine.json")
    assert derived.tokens_per_step(config) == step_tokens
    assert config.optimizer.learning_rate == learning_rate
    assert config.run.num_tokens == config.lr_schedule.decay_tokens == 20 * derived.num_parameters(config.model)
    assert config.model == model_of(name)


def test_a_short_run_has_a_hundred_steps():
    assert num_sequences(100 * 1024 * 8, 2**19, 1024) == 8
    assert num_sequences(100 * 1024 * 8 - 1, 2**19, 1024) == 4
    assert num_sequences(5, 2**19, 1024) == 1
    assert nearest_size(1).num_parameters == 125e6 and nearest_size(10**13).num_parameters == 175e9


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face folder with a tokenizer and no weights, in the current folder; the cache is there too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_folder(tmp_path / "my_llama", config=HF_LLAMA)
    return tmp_path


def convert(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["config", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_folder_and_a_text_make_a_configuration_that_loads(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "my_text.txt").write_text("".join(f"{number} is followed by {number + 1}.\n" for number in range(3000)))
    code, out, err = convert(capsys, "my_llama", "my_text.txt")
    assert code == 0, err
    (folder / "mine.json").write_text(out)
    config = load_config(folder / "mine.json")
    assert (config.data.sources, config.data.tokenizer.path) == (["my_text.txt"], "my_llama")
    assert config.run.initialize_from is None and "from random weights" in err
    assert f"{config.run.num_tokens:,} training tokens" in err and "(1 x the text)" in err
    (folder / "my_llama" / "model.safetensors").touch()
    code, out, err = convert(capsys, "my_llama", "my_text.txt", "--tokens", "1e9")
    assert json.loads(out)["run"] == {"num_tokens": 10**9, "initialize_from": "my_llama"} and "from these" in err


def test_without_a_text_and_a_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "my_llama" / "tokenizer.json").unlink()
    code, out, err = convert(capsys, "my_llama")
    raw = json.loads(out)
    assert code == 0 and raw["data"] == {"sources": []} and "x the text" not in err
    assert raw["run"]["num_tokens"] == 20 * derived.num_parameters(ModelConfig.model_validate(raw["model"]))


def test_a_folder_in_place_of_a_file(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    (folder / "my_text.txt").write_text("".join(f"{number} is followed by {number + 1}.\n" for number in range(3000)))
    code, out, _ = convert(capsys, "my_llama", "my_text.txt")
    options = parse("plan", ["--config", "my_llama", "parallel.tp_size=2", 'data.sources=["my_text.txt"]'])
    said = capsys.readouterr().err
    assert json.loads(Path(options.config).read_text()) == json.loads(out) and Path(options.config).stem == "my_llama"
    assert "my_llama: 147,776 parameters, from random weights" in said
    assert "parallel3d convert config my_llama my_text.txt > my_llama.json" in said
    raw = json.loads(Path(parse("plan", ["--config", "my_llama"]).config).read_text())
    assert raw["data"]["sources"] == [] and raw["run"]["num_tokens"] > json.loads(out)["run"]["num_tokens"]
    capsys.readouterr()
    for variables, override, wrong in (
        ({}, 'data.sources=["missing.txt"]', "missing.txt"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "run.seed=1", "a launcher"),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            parse("train", ["--config", "my_llama", override])
        assert ended.value.code == 2 and wrong in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("nowhere",), "nowhere does not exist: give the Hugging Face folder"),
        (("my_llama", "--tokens", "0"), "--tokens 0: must be at least 1"),
        (("my_llama", "--tokens", "nan"), "--tokens nan: must be at least 1"),
        (("my_llama", "--tokens", "inf"), "--tokens inf: must be at least 1"),
        (("my_llama", "missing.txt"), "missing.txt"),
    ],
)
def test_a_mistake_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], wrong: str
):
    code, out, err = convert(capsys, *arguments)
    assert code == 2 and not out and wrong in err and "Traceback" not in err
