"""A Hugging Face folder at an address: copied into the cache once, without pickled and nested copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from parallel3d.__main__ import main

FIELDS = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": (257, 16),
    "model.layers.0.input_layernorm.weight": (16,),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (16, 16) for name in "qkvo"},
    "model.layers.0.post_attention_layernorm.weight": (16,),
    "model.layers.0.mlp.gate_proj.weight": (24, 16),
    "model.layers.0.mlp.up_proj.weight": (24, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
    "model.norm.weight": (16,),
}


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store that is a folder, and a cache of the test's own."""
    folder = tmp_path / "store" / "tiny-llama"
    (folder / "original").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(FIELDS))
    generator = np.random.default_rng(1)
    save_file(
        {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()},
        folder / "model.safetensors",
    )
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "original" / "params.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    return f"file://{folder}"


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_configuration_and_a_checkpoint_of_it(address: str, tmp_path: Path, capsys: Any) -> None:
    code, out, err = run(capsys, "convert", "model", address)
    assert code == 0 and json.loads(out)["model"]["hidden_size"] == 16, err
    copies = {path.name for path in (tmp_path / ".cache").rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors"} <= copies and not copies & {"pytorch_model.bin", "params.json"}

    (tmp_path / "store" / "tiny-llama").rename(tmp_path / "gone")  # the copy is used from now on
    code, out, err = run(capsys, "convert", "from-hf", address, tmp_path / "weights")
    assert code == 0 and (tmp_path / "weights" / "index.json").exists(), err


def test_what_is_no_folder_of_a_model(address: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "store" / "empty").mkdir()
    (tmp_path / "store" / "empty" / "readme.md").write_text("nothing")
    code, _, err = run(capsys, "convert", "model", f"file://{tmp_path / 'store' / 'empty'}")
    assert code == 2 and "no complete checkpoint at file://" in err and err.count("\n") == 1


def test_a_run_is_started_with_a_file(address: str, tmp_path: Path, capsys: Any) -> None:
    code, _, err = run(capsys, "train", "--config", address)
    assert code == 2 and f"parallel3d convert config {address} > " in err
    (tmp_path / "folder").mkdir()
    code, _, err = run(capsys, "train", "--config", tmp_path / "folder")
    assert code == 2 and "It is a folder without a config.json" in err
