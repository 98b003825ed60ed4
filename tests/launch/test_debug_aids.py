"""The debug aids on real processes: what a person asks for on the command line, and finds in the run folder."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CONFIG = {
    "model": {
        "vocab_size": 512,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "parallel": {"pp_size": 2, "dp_size": 2},
    "batch": {"global_batch_size": 4, "micro_batch_size": 1, "sequence_length": 16},
    "optimizer": {"learning_rate": 1e-2},
    "run": {"num_steps": 6, "threads_per_rank": 1, "evaluate_batches": 1, "timeout_s": 60.0},
    "debug": {
        "replica_check_every": 2,
        "profile": {"steps": [3, 4], "ranks": [0, 3]},
        "dump_tensors": {"steps": [2], "names": ["layers.*.output", "*.grad"]},
    },
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with all aids: (what it printed, its folder)."""
    folder = tmp_path_factory.mktemp("debug")
    sources = sorted(Path(os.__file__).parent.glob("[a-d]*.py"))
    (folder / "text.txt").write_text("\n".join(source.read_text(errors="replace") for source in sources))
    data = {"sources": [str(folder / "text.txt")], "cache_directory": str(folder / "cache")}
    config = {**CONFIG, "data": data, "run": {**CONFIG["run"], "directory": str(folder / "run")}}
    (folder / "tiny.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "train.py"), "--config", str(folder / "tiny.json")],
        env={**{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder / "run"


def test_the_replica_check_finds_nothing(finished):
    out, _ = finished
    assert "differ" not in out


def test_dumps_of_all_ranks(finished, capsys):
    _, run = finished
    assert len(list((run / "dumps" / "step-2").iterdir())) == 4
    script = importlib.import_module("launch.compare_dumps")
    assert script.main([str(run / "dumps"), str(run / "dumps" / "step-2")]) == 0
    assert "forward: 0 of 18 differ" in capsys.readouterr().out


def test_traces_of_the_ranks_asked_for(finished):
    _, run = finished
    assert sorted(path.name for path in (run / "profile").iterdir()) == ["rank-0.json", "rank-3.json"]
    events = json.loads((run / "profile" / "rank-0.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"step 3", "step 4", "load 0", "forward 0", "backward 0", "send activation 0 -> (1, 0)"} <= names
