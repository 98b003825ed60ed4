"""The examples for `parallel3d.train`, run as scripts in small sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.full]


def run(name: str, *arguments: object, folder: Path) -> str:
    """The output of a script that runs in `folder`."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_model_of_ones_own(tmp_path: Path, text: Path) -> None:
    small = ["run.num_steps=8", "batch.sequence_length=32", f'data.sources=["{text}"]', "model.vocab_size=512"]
    cache = f"data.cache_directory={tmp_path}"
    losses = run("own_model.py", *small, cache, folder=tmp_path).splitlines()[-1]
    before, after = (float(losses.split()[index]) for index in (1, 3))
    assert losses.endswith("in 8 steps") and after < before


def test_fine_tuning_a_folder(tmp_path: Path, text: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    folder = tmp_path / "small"
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=128)).save_pretrained(folder)
    small = ["run.num_steps=4", "batch.sequence_length=32", f"data.cache_directory={tmp_path}"]
    assert "loss " in run("fine_tune_folder.py", folder, text, *small, folder=tmp_path)
    tuned, before = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "small-tuned", folder))
    assert not tuned.lm_head.weight.equal(before.lm_head.weight)


def test_in_a_notebook(tmp_path: Path) -> None:
    """The cells one after another in one process that holds torch and threads; its corpus is small here."""
    code = (EXAMPLES / "notebook_run.py").read_text().replace('"num_steps": 60', '"num_steps": 20')
    (tmp_path / "cells.py").write_text(f"import torch\ntorch.ones(9, 9) @ torch.ones(9, 9)\n{code}")
    script = tmp_path / "cells.py"
    out = run(str(script), folder=tmp_path)
    assert "step 20: " in out and "evaluation at step 20" in out and "20 steps, loss 5." in out
