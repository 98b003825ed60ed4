"""A launcher that is stopped (SIGSTOP) for a moment delays a run; one that stays stopped ends it."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.launch_runs import finish, metrics, start, wait_for_step, workers_of

UNDISTURBED = ("run.num_steps=60",)
PATIENCE_S = 3


def losses(run):
    return [line["loss"] for line in metrics(run)]


@pytest.mark.full
@pytest.mark.slow
def test_a_moment_changes_nothing(config_file, tmp_path, undisturbed):
    process = start("--config", config_file, *UNDISTURBED, f"elastic.control_timeout_s={PATIENCE_S}")
    wait_for_step(tmp_path / "run", 3)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(process.pid, signal.SIGCONT)
    code, out, err = finish(process)
    assert code == 0 and "lost" not in out, out + err
    assert losses(tmp_path / "run") == undisturbed(config_file)


@pytest.mark.full
@pytest.mark.slow
def test_workers_end_without_it_and_it_ends_once_it_goes_on(config_file, tmp_path):
    process = start("--config", config_file, "run.num_steps=100000", f"elastic.control_timeout_s={PATIENCE_S}")
    wait_for_step(tmp_path / "run", 3)
    workers = workers_of(process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    logs = [tmp_path / "run" / "logs" / f"rank-{rank}.log" for rank in range(4)]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not all(is_zombie(pid) for pid in workers):
        time.sleep(0.1)
    assert all(is_zombie(pid) for pid in workers), [log.read_text() for log in logs]
    os.kill(process.pid, signal.SIGCONT)
    code, out, err = finish(process, timeout=60)
    assert code == 4 and "Traceback" not in out + err, (code, out, err)
    assert all("ends: the coordinator has been silent for 3 s" in log.read_text() for log in logs)
    assert not any("Traceback" in log.read_text() for log in logs)


def is_zombie(pid: int) -> bool:
    """Whether a child has exited; its parent, which is stopped, can't take notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
