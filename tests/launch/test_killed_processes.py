"""Guardians and coordinators of real training that are killed: without a launcher, and under torchrun."""

import json
import os
import signal
import time

import pytest

from parallel3d.checkpoint.directory import CheckpointDirectory
from tests.support.launch_runs import (
    PATIENCE_S,
    child_of,
    children_of,
    finish,
    metrics,
    name_of,
    start,
    wait_for_change,
    wait_for_event,
    wait_for_step,
)

pytestmark = pytest.mark.slow
NUM_STEPS = 240
"""Many more than pass before the last kill: on a slow machine a test may look late."""
UNDISTURBED = (f"run.num_steps={NUM_STEPS}", "precision.sums=exact")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4")


def losses(run):
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "a step is missing, or recorded twice"
    return [line["loss"] for line in lines]


def evaluations(run):
    whole_lines = (run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
    return [line for line in whole_lines if '"event": "evaluation"' in line]


def stubs_of(torchrun, number):
    """The processes that torchrun has started, once all have their children."""
    deadline = time.monotonic() + PATIENCE_S
    while len(found := [pid for pid in children_of(torchrun.pid) if any(map(name_of, children_of(pid)))]) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.full)])
def test_without_a_launcher_killed_coordinators_change_no_bit(config_file, tmp_path, undisturbed, kills):
    run = tmp_path / "run"
    process = start("--config", config_file, *UNDISTURBED)
    for number in range(kills):
        wait_for_step(run, 4 + 8 * number)
        os.kill(child_of(process.pid, "coordinator"), signal.SIGKILL)
        wait_for_change(run, number + 1)
    code, out, err = finish(process)
    assert code == 0 and "Traceback" not in out + err, out + err
    assert "the run goes on with a new coordinator" in out and out.count("final loss") == 1
    assert losses(run) == undisturbed(config_file)
    assert len(evaluations(run)) == NUM_STEPS // 6


@pytest.mark.sample(1, rest=1)
@pytest.mark.parametrize("kind", ["evaluation", "summary"])
def test_a_coordinator_killed_at_the_very_end_is_missed_by_nobody(config_file, tmp_path, kind):
    """After the last evaluation, or once all workers have been released: then nobody can repeat anything."""
    run = tmp_path / "run"
    process = start("--config", config_file, "run.evaluate_every=12")
    wait_for_event(run, kind)
    os.kill(child_of(process.pid, "coordinator"), signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 0 and "Traceback" not in out + err, out + err
    assert len(losses(run)) == 12 and len(evaluations(run)) == 1
    summary = json.loads((run / "summary.json").read_text())
    assert summary["exit_code"] == 0 and summary["steps"] == 12 and summary["final_loss"] > 0


@pytest.mark.full
def test_killed_coordinators_between_evaluations_and_saves(config_file, tmp_path, undisturbed):
    """A checkpoint is written every other step, and every step is followed by an evaluation."""
    flags = (*UNDISTURBED, "run.evaluate_every=1")
    run = tmp_path / "run"
    process = start("--config", config_file, *flags, "checkpoint.every=2")
    for number in range(5):
        wait_for_step(run, 4 + 8 * number)
        os.kill(child_of(process.pid, "coordinator"), signal.SIGKILL)
        wait_for_change(run, number + 1)
    code, out, err = finish(process)
    assert code == 0 and "Traceback" not in out + err, out + err
    assert losses(run) == undisturbed(config_file) and len(evaluations(run)) == NUM_STEPS
    newest = CheckpointDirectory(run / "checkpoints").find_newest_valid()
    assert newest.index is not None and newest.index.step == NUM_STEPS and not newest.damaged


@pytest.mark.full
def test_a_killed_guardian_without_a_launcher_is_a_restart(config_file, tmp_path):
    restarting = ('restart={"max_restarts": 1, "backoff_s": 0.1}', "checkpoint.every=5", "run.num_steps=200")
    process = start("--config", config_file, *restarting)
    wait_for_step(tmp_path / "run", 8)
    os.kill(child_of(process.pid, "guardian"), signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 0 and "Traceback" not in out + err, out + err
    assert "restart 1 of 1 in 0.1 s from " in out and "its guardian on " in out
    assert len(losses(tmp_path / "run")) == 200


@pytest.mark.full
def test_a_killed_coordinator_still_leads_to_a_restart_later(config_file, tmp_path):
    """Its successor knows what it must from the run folder."""
    restarting = ('restart={"max_restarts": 1, "backoff_s": 0.1}', "checkpoint.every=5", "run.num_steps=200")
    process = start("--config", config_file, *restarting)
    wait_for_step(tmp_path / "run", 8)
    os.kill(child_of(process.pid, "coordinator"), signal.SIGKILL)
    wait_for_change(tmp_path / "run", 1)
    os.kill(child_of(process.pid, "guardian"), signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 0 and "Traceback" not in out + err, out + err
    assert "restart 1 of 1 in 0.1 s from " in out
    assert len(losses(tmp_path / "run")) == 200


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("name", ["guardian", "coordinator"])
def test_under_torchrun_the_run_goes_on(config_file, tmp_path, undisturbed, name):
    run = tmp_path / "run"
    process = start("--config", config_file, *UNDISTURBED, launcher=TORCHRUN)
    stubs = stubs_of(process, 4)
    wait_for_step(run, 4)
    there = [child for stub in stubs for child in children_of(stub) if name_of(child) == f"p3d-{name}"]
    os.kill(there[-1], signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 0 and "Traceback" not in out + err, out + err
    assert losses(run) == undisturbed(config_file)
    assert out.count("final loss") == 1
    assert ("lost rank" in out) == (name == "guardian")
