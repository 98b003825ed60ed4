"""`launch/plan.py` from a shell: what it prints, and how it says what is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "plan.py"
CONFIG = {
    "model": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
    },
    "parallel": {"pp_size": 3, "stage_replicas": [2, 1, 2]},
    "batch": {"micro_batch_size": 2, "num_micro_batches": 4, "sequence_length": 32},
    "optimizer": {"learning_rate": 1e-3},
    "run": {"num_steps": 1},
}


def run_script(folder, *arguments):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, str(SCRIPT), "--config", "config.json", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_the_report(tmp_path):
    done = run_script(tmp_path, "parallel.layers_per_stage=[2,1,3]", "--png", "plan.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 stages x 2/1/2 replicas x 1 tensor ranks = 5 ranks" in done.stdout
    assert "2      2         3-5 (3)" in done.stdout
    assert "     1: 1 > 0 > 1\n     3: 1 > 0 > 1\n" in done.stdout
    assert "stage 1 replica 0 " in done.stdout
    assert (tmp_path / "plan.png").exists()


@pytest.mark.slow
def test_mistakes_are_one_message(tmp_path):
    done = run_script(tmp_path, "parallel.pp_sizes=2")
    assert done.returncode == 2
    assert "Did you mean" in done.stderr and "Traceback" not in done.stderr
