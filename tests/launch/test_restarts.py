"""Runs that can't go on in place, with real processes: they restart from a checkpoint, or end with the reason."""

import json
import os
import signal
import time

import pytest

from parallel3d.checkpoint.directory import CheckpointDirectory, read_index
from parallel3d.monitor.run_costs import restart_times_s, save_costs
from parallel3d.monitor.run_folder import read_metrics
from tests.support.launch_runs import PATIENCE_S, finish, metrics, start, workers_of

pytestmark = pytest.mark.slow
where_ci_is_set = pytest.mark.skipif(not os.environ.get("CI"), reason="seconds each: only where CI is set")
NUM_STEPS, TOKENS = 14, 8 * 32
FRAGILE = ("parallel.dp_size=1", f"run.num_steps={NUM_STEPS}")
"""Each worker is the only one of its stage."""
UNDISTURBED = FRAGILE
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "1")


def faults(*them):
    """As the configuration takes them. The two steps before each last longer, so that most often what is being saved is
    on disk; no test depends on it."""
    naps = [
        {"rank": 0, "step": fault["step"] - back, "attempt": fault.get("attempt", 0), "kind": "sleep", "seconds": 0.4}
        for fault in them
        for back in (1, 2)
    ]
    return "elastic.faults=" + json.dumps([*them, *naps])


def restarting(most=3, every=2, **fields):
    fields = {"max_restarts": most, "backoff_s": 0.1, "max_backoff_s": 90.0, **fields}
    return [f"restart={json.dumps(fields)}", f"checkpoint.every={every}"]


def losses(run):
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "a step is missing, or recorded twice"
    return [line["loss"] for line in lines]


def events(run, name):
    return [line for line in read_metrics(run / "metrics.jsonl") if line.get("event") == name]


def summary(run):
    return json.loads((run / "summary.json").read_text())


@pytest.mark.full
def test_two_fatal_kills_and_the_curve_is_the_undisturbed_one(config_file, tmp_path, undisturbed):
    kills = faults(dict(rank=1, step=6, phase="backward"), dict(rank=0, step=11, phase="update", attempt=1))
    code, out, err = finish(start("--config", config_file, *FRAGILE, *restarting(), kills))
    run = tmp_path / "run"
    assert code == 0, out + err
    assert losses(run) == undisturbed(config_file)
    first, second = events(run, "restart")
    assert first["step"] < 6 and second["step"] < 11  # how far the writing of checkpoints was is a matter of time
    assert "restart 1 of 3 in 0.1 s from " in out and "restart 2 of 3 in 0.1 s from " in out
    assert "lost: the run can't go on: stage 1 has no replica left: lost pp1 dp0 tp0 (rank 1); rank 1 (" in out
    found, lost = summary(run), read_metrics(run / "lost-steps.jsonl")
    num_lost = len([line for line in lost if "event" not in line])
    assert (found["restarts"], found["lost_steps"], found["steps"]) == (2, num_lost, 14)
    assert 0 < found["productive_s"] < found["wall_s"] and found["uptime"] == found["productive_s"] / found["wall_s"]
    lines = read_metrics(run / "metrics.jsonl")
    restarts_s, saves = list(restart_times_s(lines)), save_costs(lines)
    assert len(restarts_s) == 2 and all(0.1 < seconds < found["wall_s"] for seconds in restarts_s)  # 0.1 s is the wait
    assert saves is not None and saves.num_saves >= 2 and 0 < saves.snapshot_s < found["wall_s"]
    assert "goodput (productive / wall)" in out and "Traceback" not in out + err


@where_ci_is_set
def test_all_replicas_of_a_stage_are_killed(config_file, tmp_path):
    kills = faults(*(dict(rank=rank, step=8, phase="forward") for rank in (2, 3)))
    code, out, err = finish(start("--config", config_file, *restarting(), kills))
    assert code == 0, out + err
    assert len(losses(tmp_path / "run")) == 12
    (event,) = events(tmp_path / "run", "restart")
    assert "stage 1 has no replica left" in event["why"] and "rank 3" in event["why"]
    assert summary(tmp_path / "run")["world"] == 4  # all are there again


@pytest.mark.full
def test_a_divergence_is_rolled_back_and_its_data_left_out(config_file, tmp_path, undisturbed):
    fault = faults(dict(rank=0, step=8, kind="nan"))
    code, out, err = finish(start("--config", config_file, *FRAGILE, *restarting(), fault))
    assert code == 0, out + err
    run = tmp_path / "run"
    (event,) = events(run, "restart")
    step, lost = event["step"], 8 - event["step"]
    assert event["skips_data"] and "8 is skipped: training has diverged in step 8: the loss or a gradient is not" in out
    assert losses(run)[:step] == undisturbed(config_file)[:step] and losses(run)[step] != undisturbed(config_file)[step]
    state = read_index(run / "checkpoints" / "latest").facts.state
    assert (state["iteration"], state["tokens_trained"]) == (NUM_STEPS, NUM_STEPS * TOKENS)
    assert state["tokens_read"] == (NUM_STEPS + lost) * TOKENS


@pytest.mark.full
@where_ci_is_set
def test_a_run_that_only_diverges_ends(config_file, tmp_path):
    arguments = [*FRAGILE, *restarting(every=1), "optimizer.learning_rate=1e38"]
    code, out, err = finish(start("--config", config_file, *arguments))
    assert code == 6 and "Traceback" not in out + err, out + err
    assert err.splitlines() == [
        "training has diverged in step 2: the loss or a gradient is not finite",
        "no checkpoint is left from before step 1, where this start began",
    ]
    assert CheckpointDirectory(tmp_path / "run" / "checkpoints").find_newest_valid().index.step == 1
    assert len(events(tmp_path / "run", "restart")) == 1 and summary(tmp_path / "run")["exit_code"] == 6


@pytest.mark.full
@where_ci_is_set
def test_as_many_restarts_as_are_allowed(config_file, tmp_path):
    kills = faults(*(dict(rank=1, step=5, attempt=attempt) for attempt in (0, 1, 2)))
    code, out, err = finish(start("--config", config_file, *FRAGILE, *restarting(most=1), kills))
    assert code == 3, out + err
    assert "\nrank 1 (pp1 dp0 tp0) was killed by SIGKILL in step 5\n" in err
    said, _, then = err.splitlines()[-1].partition("; ")
    assert "restarted once, as often as restart.max_restarts allows" in said
    assert then.startswith(
        ("run.resume=auto resumes from ", "no checkpoint exists to resume from ")
    )  # a matter of time
    assert summary(tmp_path / "run")["restarts"] == 1


@pytest.mark.full
def test_ctrl_c_while_it_waits_ends_it_at_once(config_file, tmp_path):
    arguments = [*FRAGILE, *restarting(backoff_s=90.0), faults(dict(rank=0, step=5))]
    process = start("--config", config_file, *arguments)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while "restart 1 of 3 in 90 s" not in process.stdout.readline():
            assert time.monotonic() < deadline
        assert not workers_of(process.pid)
        interrupted = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
    finally:
        code, out, err = finish(process)
    assert code == 130 and time.monotonic() - interrupted < 60
    assert "stopped before the restart after step" in err and "Traceback" not in out + err


@pytest.mark.full
@where_ci_is_set
def test_torchrun_restarts_and_the_run_goes_on(config_file, tmp_path, undisturbed):
    """Whatever run.resume says of the first start. One process of all reads the checkpoint."""
    kill = faults(dict(rank=1, step=8, phase="backward"))
    arguments = [*FRAGILE, "checkpoint.every=2", "run.resume=never", kill]
    code, out, err = finish(start("--config", config_file, *arguments, launcher=TORCHRUN))
    assert code == 0, out + err
    (event,) = events(tmp_path / "run", "restart")
    assert event["number"] == 1 and "killed by SIGKILL in step 8" in event["why"]
    assert losses(tmp_path / "run") == undisturbed(config_file)
    assert summary(tmp_path / "run")["restarts"] == 1 and not (tmp_path / "run" / "previous-1").exists()
