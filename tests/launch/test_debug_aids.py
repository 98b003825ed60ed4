"""The debug aids on real processes: requested on the command line, found in the run folder."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch_runs import PATIENCE_S

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
    "run": {"num_steps": 6, "threads_per_rank": 1, "evaluate_batches": 1, "timeout_s": 300.0},
    "elastic": {"max_rejoins": 0},
    "monitor": {"charts": False},
    "debug": {
        "replica_check_every": 2,
        "profile": {"steps": [3, 4], "ranks": [0, 3]},
        "dump_tensors": {"steps": [2], "names": ["layers.*.output", "*.grad"]},
    },
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("debug")
    sources = sorted(Path(os.__file__).parent.glob("[a-d]*.py"))
    (folder / "text.txt").write_text("\n".join(source.read_text(errors="replace") for source in sources))
    data = {"sources": [str(folder / "text.txt")], "cache_directory": str(folder / "cache")}
    config = {**CONFIG, "data": data, "run": {**CONFIG["run"], "directory": str(folder / "run")}}
    (folder / "tiny.json").write_text(json.dumps(config))
    return folder / "tiny.json"


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch" / "train.py"), "--config", *map(str, arguments)],
        env={**{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(condition, what, timeout_s=PATIENCE_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def finished(config_file):
    """A run with all aids: (what it printed, its folder)."""
    process = start(config_file)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out
    return out, config_file.parent / "run"


def test_the_replica_check_finds_nothing(finished):
    out, _ = finished
    assert "differ" not in out


def test_dumps_of_all_ranks(finished, capsys):
    out, run = finished
    assert len(list((run / "dumps" / "step-2").iterdir())) == 4
    assert f"step 2: tensors dumped to {run}/dumps/step-2" in out
    script = importlib.import_module("parallel3d.commands.compare_dumps")
    assert script.main([str(run / "dumps"), str(run / "dumps" / "step-2")]) == 0
    assert "forward: 0 of 18 differ" in capsys.readouterr().out


def test_traces_of_the_ranks_asked_for(finished):
    _, run = finished
    assert sorted(path.name for path in (run / "profile").iterdir()) == ["rank-0.json", "rank-3.json"]
    events = json.loads((run / "profile" / "rank-0.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"step 3", "step 4", "load 0", "forward 0", "backward 0", "send activation 0 -> (1, 0)"} <= names


@pytest.mark.full
def test_a_slow_step_is_reported_and_the_run_continues(config_file, tmp_path):
    """Rank 1 sleeps in a step: a table lists the ranks that wait for it, and its log has its stack. Then on demand."""
    fault = {"rank": 1, "step": 8, "phase": "forward", "kind": "sleep", "seconds": 4.0}
    process = start(
        config_file,
        f"run.directory={tmp_path}",
        "run.num_steps=1000000",
        f"elastic.faults=[{json.dumps(fault)}]",
        "debug.slow_step_min_s=2.0",
        "debug.slow_step_factor=1.0",
        "debug.profile.steps=[]",
        "debug.dump_tensors.steps=[]",
    )
    metrics = tmp_path / "metrics.jsonl"

    def lines():
        text = metrics.read_text() if metrics.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def tables(head):
        return [line["text"] for line in lines() if line.get("event") == "notice" and line["text"].startswith(head)]

    def num_steps():
        return sum("event" not in line for line in lines())

    try:
        wait_until(lambda: tables("step 8 is slow"), "the table of the overdue step")
        head, *rows = tables("step 8 is slow")[0].splitlines()
        assert "no progress for" in head and len(rows) == 4
        assert [row.split()[1] for row in rows] == ["0", "1", "2", "3"]
        assert "rank 1 (pp0 dp1 tp0) [step 8, forward" in rows[1] and "blocks others" in rows[1]
        assert "rank 3 (pp1 dp1 tp0) [step 8, receive" in rows[3] and "waits for rank 1" in rows[3]
        wait_until(lambda: num_steps() > 8, "the run to go on")
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: tables("status of all ranks"), "the table that was asked for")
        assert len(tables("status of all ranks")[0].splitlines()) == 5
        assert not any(line.get("event") == "membership" for line in lines())
    finally:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and "step 8 is slow" in out and "Traceback" not in out
    log = (tmp_path / "logs" / "rank-1.log").read_text()
    assert "most recent call first" in log and "fault_injection.py" in log


@pytest.mark.full
def test_a_flipped_bit_ends_the_run_with_its_name(config_file, tmp_path):
    fault = {"rank": 3, "step": 4, "phase": "forward", "kind": "flip"}
    process = start(config_file, f"run.directory={tmp_path}", f"elastic.faults=[{json.dumps(fault)}]")
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 5, out
    assert "copies that must be the same bits differ before the update of step 4:" in out
    assert re.search(r"weights of [a-z0-9._]+\[0:\d+\]: rank 2 \(pp1 dp0 tp0\) / rank 3 \(pp1 dp1 tp0\)", out), out
    assert "Traceback" not in out
