"""Workers join a run from other shells: by a command with the run's folder; those that do not fit stay out."""

import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.launch.test_returning_workers import TORCHRUN, changes, kill
from tests.support import wrong_bit
from tests.support.launch_runs import finish, metrics, start, wait_for_change, wait_for_step

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SETTINGS = ("run.num_steps=100000", "precision.sums=exact")
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "node1",
}
"""What srun sets for a step of one task."""


def stop(*processes):
    """Stops a run by its first process; returns what that has printed. None of its processes may be left."""
    processes[0].send_signal(signal.SIGINT)
    (code, out, err), *others = [finish(process) for process in processes]
    assert code == 130 and [other[0] for other in others] == [130] * len(others), (out, err, others)
    return out


def test_a_worker_joins_from_another_shell(config_file, tmp_path):
    """By the folder's configuration; its number comes from the run. It leaves at SIGTERM, and another one comes."""
    run = tmp_path / "run"
    process = start("--config", config_file, *SETTINGS)
    wait_for_step(run, 4)
    kill(run, 3)
    wait_for_change(run, 1)
    guest = start("--config", run / "config.json", "--join")
    wait_for_change(run, 2)
    wait_for_step(run, len(metrics(run)) + 3)
    guest.send_signal(signal.SIGTERM)
    assert finish(guest)[0] == 0
    wait_for_change(run, 3)
    second = start("--config", config_file, *SETTINGS, "--join")
    wait_for_change(run, 4)
    wait_for_step(run, len(metrics(run)) + 3)
    out = stop(process, second)
    assert [change["live"] for change in changes(run)] == [3, 4, 3, 4]
    assert [[each["rank"] for each in change["joined"]] for change in changes(run)] == [[], [4], [], [5]]
    assert out.count(" is a spare") == 2
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert not (run / ".coordinator").exists()


@pytest.mark.full
@pytest.mark.sample(0, rest=2)
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("configuration", "configuration [0-9a-f]+, the run has"),
        ("code", "code [0-9a-f]+, the run has"),
        ("device", "cpu computes [0-9a-f]+ in place of"),
    ],
)
def test_a_worker_that_is_not_like_the_run_stays_out(config_file, tmp_path, other, reason):
    """With another configuration, from another checkout, or on a device that computes one bit wrong."""
    run = tmp_path / "run"
    process = start("--config", config_file, *SETTINGS)
    wait_for_step(run, 4)
    kill(run, 3)
    wait_for_change(run, 1)
    join = ("--config", config_file, *SETTINGS, "--join")
    if other == "configuration":
        guest = start(*join, "optimizer.learning_rate=0.5")
    elif other == "code":
        guest = start(*join, train=another_checkout(tmp_path / "checkout"))
    else:
        guest = start(*join, launcher=[wrong_bit.__file__])
    code, _, err = finish(guest)
    out = stop(process)
    assert code == 2 and "does not join" in out, (err, out)
    assert all(re.search(f"not admitted: {reason} ", each) for each in (out, err)), (err, out)
    assert len(changes(run)) == 1


def another_checkout(folder):
    """Returns the script of a copy of this checkout, one file of which is not the same."""
    for name in ("parallel3d", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "parallel3d" / "optim" / "__init__.py").open("a") as file:
        file.write("\n# a later version\n")
    return folder / "launch" / "train.py"


@pytest.mark.full
def test_a_torchrun_and_an_srun_step_of_their_own_each_bring_a_worker(config_file, tmp_path, monkeypatch):
    """Their variables are those of a world of its own, to which the run pays no regard."""
    run = tmp_path / "run"
    process = start("--config", config_file, *SETTINGS)
    wait_for_step(run, 4)
    kill(run, 3)
    wait_for_change(run, 1)
    start("--config", run / "config.json", "--join", launcher=(*TORCHRUN, "1"))
    wait_for_change(run, 2)
    kill(run, 1)
    wait_for_change(run, 3)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    step = start("--config", run / "config.json", "--join")
    wait_for_change(run, 4)
    wait_for_step(run, len(metrics(run)) + 3)
    stop(step, process)  # Ctrl-C where a worker has joined stops the run, too
    assert [change["live"] for change in changes(run)] == [3, 4, 3, 4]
    assert [[each["rank"] for each in change["joined"]] for change in changes(run)] == [[], [4], [], [5]]
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))


def test_there_is_no_run_to_join(config_file, tmp_path):
    code, _, err = finish(start("--config", config_file, "--join"))
    assert code == 2 and "no run goes on there" in err
