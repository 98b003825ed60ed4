"""launch/train.py as a user runs it: real processes, a real text, real mistakes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch_runs import (
    PATIENCE_S,
    TRAIN,
    finish,
    metrics,
    start,
    wait_for_change,
    wait_for_step,
    workers_of,
)

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_a_run_and_all_that_it_leaves(config_file, tmp_path):
    code, out, err = finish(start("--config", config_file, "monitor.charts=true"))
    assert code == 0, out + err
    run = tmp_path / "run"
    names = {path.name for path in run.iterdir()}
    assert {
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "results.json",
        "loss.png",
        "course.png",
        "instability.png",
        "logs",
    } <= names
    results = json.loads((run / "results.json").read_text())
    figures = results["summary"]
    assert figures["peak_tokens_per_s"] >= figures["tokens_per_s"] > 0 and figures["seconds"] > 0
    assert results["configuration"]["model"]["hidden_size"] == 32 and results["environment"]["packages"]["torch"]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    steps = metrics(run)
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert {"tokens", "loss", "grad_norm", "lr", "tokens_per_s", "memory_bytes"} <= steps[0].keys()
    assert {"perplexity", "loss_ratio", "fraction_clipped", "param_norm", "variance_norm", "mfu"} <= steps[1].keys()
    assert steps[-1]["tokens"] == 12 * 8 * 32 and steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    summary = json.loads((run / "summary.json").read_text())
    assert {"final_loss", "unigram_entropy", "tokens", "seconds", "tokens_per_s", "world"} <= summary.keys()
    assert summary["world"] == 4 and summary["exit_code"] == 0
    assert 0 < summary["bubble"] < 1 and 0 < summary["planned_bubble"] < 1
    assert "unigram entropy" in out and "optimizer state by rank" in out and str(run) in out
    assert sorted(path.name for path in (run / "logs").iterdir()) == [f"rank-{rank}.log" for rank in range(4)]

    resolved = json.loads((run / "config.json").read_text())
    assert resolved["batch"]["num_micro_batches"] == 8 and resolved["model"]["num_key_value_heads"] == 2

    code, out, err = finish(start("--config", config_file, "parallel.pp_size=1", "parallel.dp_size=1"))
    assert code == 0 and "an earlier run's files are now in" in out
    assert [line["loss"] for line in metrics(run)] == pytest.approx([line["loss"] for line in steps], rel=1e-4)


@pytest.mark.full
def test_the_same_file_under_torchrun(config_file, tmp_path):
    code, out, err = finish(start("--config", config_file, "run.directory=" + str(tmp_path / "plain")))
    assert code == 0, out + err
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4")
    code, out, err = finish(start("--config", config_file, launcher=launcher))
    assert code == 0, out + err
    plain, torchrun = metrics(tmp_path / "plain"), metrics(tmp_path / "run")
    assert [line["loss"] for line in torchrun] == [line["loss"] for line in plain]
    assert out.count("final loss") == 1


def test_a_killed_worker_is_lost_and_the_run_goes_on(config_file, tmp_path):
    process = start("--config", config_file, "run.num_steps=100000")
    wait_for_step(tmp_path / "run", 3)
    workers = workers_of(process.pid)
    os.kill(workers[0], signal.SIGKILL)  # the leader
    wait_for_change(tmp_path / "run", 1)
    wait_for_step(tmp_path / "run", metrics(tmp_path / "run")[-1]["step"] + 3)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130 and "Traceback" not in out + err
    assert re.search(
        r"generation 1: lost rank 0 \(pp0 dp0 tp0\): killed by SIGKILL in step \d+; 3 live, 0 spare, 1 lost", out
    )
    steps = [line["step"] for line in metrics(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.full
def test_without_elasticity_a_killed_worker_is_named_and_no_other_hangs(config_file, tmp_path):
    process = start("--config", config_file, "run.num_steps=100000", "elastic.enabled=false")
    wait_for_step(tmp_path / "run", 3)
    workers = workers_of(process.pid)
    assert len(workers) == 4
    os.kill(workers[2], signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 3
    assert re.search(r"rank 2 \(pp1 dp0 tp0\) was killed by SIGKILL in step \d+", err), err
    assert "Traceback" not in out + err
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_ctrl_c_ends_after_the_step(config_file, tmp_path):
    process = start("--config", config_file, "run.num_steps=100000")
    wait_for_step(tmp_path / "run", 3)
    workers = workers_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130 and "Traceback" not in out + err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_early"] and summary["steps"] == len(metrics(tmp_path / "run"))
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


MISTAKES = {
    "a missing configuration": (["--config", "configs/quickstrat.json"], "quickstrat.json"),
    "an unknown field": (["model.hiden_size=64"], "Did you mean model.hidden_size?"),
    "heads that do not divide": (["parallel.tp_size=3"], "parallel.tp_size"),
    "too few micro-batches": (["batch.global_batch_size=1"], "micro"),
    "a missing text": (['data.sources=["/nowhere/text.txt"]'], "/nowhere/text.txt"),
    "a world that does not fit": (["parallel.stage_replicas=[1,2,3]", "parallel.dp_size=null"], "stage_replicas"),
    "sequences that do not divide": (
        ["parallel.tp_size=2", "parallel.sequence_parallel=true", "batch.sequence_length=31"],
        "sequence_length",
    ),
    "an argument that is none": (["num_steps"], "num_steps"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_clear_message(config_file, mistake, tmp_path):
    arguments, named = MISTAKES[mistake]
    first = [] if "--config" in arguments else ["--config", config_file]
    code, out, err = finish(start(*first, *arguments))
    assert code == 2 and named in err and "Traceback" not in out + err, out + err
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4")])
def test_gpus_that_are_not_there_are_one_clear_message(config_file, tmp_path, monkeypatch, launcher):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = finish(start("--config", config_file, "run.device=cuda", launcher=launcher))
    assert code == (1 if launcher else 2), out + err
    assert err.count("needs 4 GPUs, one for each worker of this host, and torch finds 0 here") == 1, err
    assert not (tmp_path / "run").exists() and "rank 0" not in out


@pytest.mark.full
def test_an_empty_corpus(config_file, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    code, out, err = finish(start("--config", config_file, f'data.sources=["{empty}"]'))
    assert code == 2 and "empty.txt" in err and "Traceback" not in out + err, out + err


@pytest.mark.full
def test_a_taken_port(config_file):
    """A launcher without a store of its own names a port on which another process listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        done = subprocess.run(
            [sys.executable, TRAIN, "--config", str(config_file), "parallel.pp_size=1", "parallel.dp_size=1"],
            env={**os.environ, **names, "MASTER_PORT": str(taken.getsockname()[1])},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode != 0 and "port" in done.stderr and "Traceback" not in done.stdout + done.stderr


def test_print_config_starts_nothing(config_file, tmp_path):
    code, out, err = finish(start("--config", config_file, "--print-config", "run.seed=7"))
    assert code == 0 and json.loads(out)["run"]["seed"] == 7 and not (tmp_path / "run").exists()
