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
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_report(tmp_path):
    done = run_script(tmp_path, "parallel.layers_per_stage=[2,1,3]", "--png", "plan.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 stages x 2/1/2 replicas x 1 tensor ranks = 5 ranks" in done.stdout
    assert "2      2         3-5 (3)" in done.stdout
    assert "     1: 1 > 0 > 1\n     3: 1 > 0 > 1\n" in done.stdout
    assert "stage 1 replica 0 " in done.stdout
    assert "(3 is the forward of micro-batch 3, 3' its " in done.stdout
    assert (tmp_path / "plan.png").exists()


@pytest.mark.slow
@pytest.mark.full
def test_the_estimate_for_many_workers(tmp_path):
    done = run_script(tmp_path, "--workers", "10240")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the coordinator of 10,240 workers, 8 sequences a step" in done.stdout
    assert "a guardian for 8 workers: 1,280 connections; start " in done.stdout
    assert "as under torchrun, through relays of hosts of 8: 1,280 connections; start " in done.stdout
    assert "one for each, without relays: 10,240 connections; start " in done.stdout
    assert done.stdout.count("MB; its groups over gloo 0.18 s, ") == 3
    done = run_script(tmp_path, "--workers", "0")
    assert done.returncode == 2 and "must be at least 1" in done.stderr


@pytest.mark.slow
def test_the_prediction_for_a_gpu(tmp_path):
    sizes = ["parallel.pp_size=1", "parallel.stage_replicas=null", "parallel.dp_size=2"]
    done = run_script(tmp_path, *sizes, "--device", "H100,H200")
    assert (done.returncode, done.stderr) == (0, "")
    assert "H200-141GB: " in done.stdout and done.stdout.count("(predicted)") == 2
    done = run_script(tmp_path, "--device", "H200")
    assert done.returncode == 2 and "on one stage" in done.stderr


@pytest.mark.full
@pytest.mark.slow
def test_the_report_after_losses(tmp_path):
    sizes = ["parallel.pp_size=4", "parallel.stage_replicas=null", "parallel.dp_size=4", "batch.num_micro_batches=32"]
    done = run_script(tmp_path, *sizes, "parallel.tp_size=2", "--lost", "13")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 stages x 4/3/4/4 replicas x 2 tensor ranks = 30 ranks" in done.stdout
    assert "rank 13 (pp1 dp2 tp1): lost\nrank 12 (pp1 dp2 tp0): spare" in done.stdout
    lines = done.stdout.splitlines()
    table = lines[lines.index("candidates, in time units:") + 1 :][:12]
    assert [line.startswith("  > ") for line in table].count(True) == 1
    spans = {line[4:-8].strip(): int(line.split()[-1]) for line in table}
    assert len(spans) == 12
    [taken] = [line for line in table if line.startswith("  > ")]
    assert int(taken.split()[-1]) == min(spans.values()) < spans["drop"]


@pytest.mark.full
@pytest.mark.slow
def test_two_broken_replicas_become_a_whole_one(tmp_path):
    """As in a run: the only replicas of the first stage are broken, and what is left of them is one."""
    sizes = ["parallel.pp_size=1", "parallel.stage_replicas=null", "parallel.dp_size=2", "parallel.tp_size=2"]
    done = run_script(tmp_path, *sizes, "--lost", "0,3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 stages x 1 replicas x 2 tensor ranks = 2 ranks" in done.stdout
    assert "rank 3 (pp0 dp1 tp1): lost\nrank 2 (pp0 dp1 tp0): now pp0 dp0 tp0\n\n" in done.stdout


@pytest.mark.full
@pytest.mark.slow
def test_the_report_of_virtual_stages(tmp_path):
    sizes = ["parallel.schedule=interleaved", "parallel.virtual_stages=2", "parallel.stage_replicas=[1,1,1]"]
    done = run_script(tmp_path, *sizes, "batch.num_micro_batches=6", "--png", "plan.png")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split("  ")[:1] + line.split()[2:5] for line in lines if " (2) " in line] == [
        ["0", "0-0", "3-3", "(2)"],
        ["1", "1-1", "4-4", "(2)"],
        ["2", "2-2", "5-5", "(2)"],
    ]
    assert "interleaved on 3 stages of 2 chunks x 1 replicas, 6 micro-batches" in done.stdout
    assert "bubble 14.3%" in done.stdout  # (3 - 1) / (2 * 6 + 3 - 1)
    assert "stage 0   0a  1a  2a  0b  1b  2b" in done.stdout


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("2", "--lost 2: training would end there: stage 1 has no replica left: lost pp1 dp0 tp0 (rank 2). Lose fewer"),
        ("7,1", "--lost 7: the ranks are 0 to 4"),
        ("one", "--lost one: give the numbers of ranks"),
        ("4", "--lost 4: training would end there: range 1 of the optimizer state of stage 2, tp 0 has no holder left"),
    ],
)
def test_losses_that_make_no_sense(tmp_path, lost, message):
    done = run_script(tmp_path, "elastic.zero_backups=0", "--lost", lost)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.full
@pytest.mark.slow
def test_a_run_that_is_not_elastic_has_no_plan_after_a_loss(tmp_path):
    done = run_script(tmp_path, "elastic.enabled=false", "--lost", "3")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--lost 3: training would end there: elastic.enabled is false" in done.stderr
    assert run_script(tmp_path, "elastic.enabled=false").returncode == 0


@pytest.mark.full
@pytest.mark.slow
def test_mistakes_are_one_message(tmp_path):
    done = run_script(tmp_path, "parallel.pp_sizes=2")
    assert done.returncode == 2
    assert "Did you mean" in done.stderr and "Traceback" not in done.stderr
