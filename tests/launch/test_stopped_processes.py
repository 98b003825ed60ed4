"""A process of a run that is stopped (SIGSTOP) for a moment delays it at most; what stays stopped is killed."""

import os
import signal
import time

import pytest

from tests.support.launch_runs import child_of, finish, metrics, start, wait_for_change, wait_for_step

UNDISTURBED = ("run.num_steps=60",)
PATIENCE_S = 3


def losses(run):
    return [line["loss"] for line in metrics(run)]


def pid_of(stub, name):
    return stub.pid if name == "stub" else child_of(stub.pid, name)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.sample(0, rest=2)
@pytest.mark.parametrize("name", ["stub", "guardian", "coordinator"])
def test_a_moment_changes_nothing(config_file, tmp_path, undisturbed, name):
    process = start("--config", config_file, *UNDISTURBED, f"elastic.control_timeout_s={PATIENCE_S}")
    wait_for_step(tmp_path / "run", 3)
    pid = pid_of(process, name)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(pid, signal.SIGCONT)
    code, out, err = finish(process)
    assert code == 0 and "lost" not in out, out + err
    assert losses(tmp_path / "run") == undisturbed(config_file)


@pytest.mark.full
@pytest.mark.slow
def test_a_stopped_coordinator_is_replaced(config_file, tmp_path):
    process = start("--config", config_file, "run.num_steps=100000", f"elastic.control_timeout_s={PATIENCE_S}")
    wait_for_step(tmp_path / "run", 3)
    os.kill(child_of(process.pid, "coordinator"), signal.SIGSTOP)
    wait_for_change(tmp_path / "run", 1)
    wait_for_step(tmp_path / "run", metrics(tmp_path / "run")[-1]["step"] + 3)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130 and "Traceback" not in out + err, (code, out, err)
    assert "the run goes on with a new coordinator" in out
    steps = [line["step"] for line in metrics(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))  # those of the time in which it was stopped, too
