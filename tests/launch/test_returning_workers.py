"""Workers of real training die and come back: without a launcher, and under torchrun. Sums are exact."""

import json
import os
import re
import signal

import pytest

from tests.support.launch_runs import finish, metrics, start, wait_for_change, wait_for_step

pytestmark = pytest.mark.slow
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
SETTINGS = ("run.num_steps=100000", "precision.sums=exact")
REJOINS, SPARE = "elastic.max_rejoins=3", "elastic.spares=1"
CODES_OF_TORCHRUN = (1, -signal.SIGABRT)
"""At Ctrl-C. An abort is torch's: its rendezvous has a thread that may be in a call of the store as Python ends."""


def kill(run, rank, number=signal.SIGKILL):
    """Sends a signal to a worker, which its log names."""
    log = (run / "logs" / f"rank-{rank}.log").read_text()
    os.kill(int(re.findall(r"is process (\d+)", log)[0]), number)


def changes(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()]
    return [line for line in lines if line.get("event") == "membership"]


def stop_after(process, run, num_steps):
    """Stops a run some steps later; returns its losses and what it has printed."""
    wait_for_step(run, len(metrics(run)) + num_steps)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    is_torchrun = "torch.distributed.run" in process.args
    assert code in (CODES_OF_TORCHRUN if is_torchrun else (130,)) and "Traceback" not in out, out + err
    assert json.loads((run / "summary.json").read_text())["stopped_early"], out + err
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "a step is missing, or recorded twice"
    return [line["loss"] for line in lines], out


@pytest.mark.parametrize(
    ("launcher", "setting", "victims"),
    [
        pytest.param((), REJOINS, (0,), id="the leader"),
        pytest.param((*TORCHRUN, "4"), REJOINS, (3, 0, 4), id="torchrun", marks=pytest.mark.full),
        pytest.param((), REJOINS, (0, 1, 2, 3, 4), id="all", marks=pytest.mark.full),
        pytest.param((*TORCHRUN, "5"), SPARE, (0,), id="a spare", marks=pytest.mark.full),
    ],
)
def test_lost_workers_come_back_and_change_no_bit(config_file, tmp_path, launcher, setting, victims):
    """Worker 4 is the first one that joins; where all of the first ones are lost, it becomes the leader."""
    run = tmp_path / "run"
    process = start("--config", config_file, *SETTINGS, setting, launcher=launcher)
    wait_for_step(run, 4)
    for number, victim in enumerate(victims):
        kill(run, victim)
        wait_for_change(run, 2 * number + 2)
        wait_for_step(run, len(metrics(run)) + 3)
    losses, out = stop_after(process, run, 3)
    assert [change["live"] for change in changes(run)] == [3, 4] * len(victims)
    joined = [[each["rank"] for each in change["joined"]] for change in changes(run)[1::2]]
    assert joined == [[4 + number] for number in range(len(victims))]
    assert out.count(" joins; 4 live, 0 spare, 0 lost; back in ") == len(victims)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["final_loss"] == sum(losses[-10:]) / len(losses[-10:]) and summary["mfu"] is not None
    undisturbed = start("--config", config_file, *SETTINGS, f"run.directory={tmp_path}/undisturbed")
    wait_for_step(tmp_path / "undisturbed", len(losses) - 3)
    others, _ = stop_after(undisturbed, tmp_path / "undisturbed", 3)
    num_compared = min(len(losses), len(others))
    assert num_compared >= len(losses) - 3 and losses[:num_compared] == others[:num_compared]


@pytest.mark.full
def test_a_spare_that_nobody_needs_widens_a_stage_and_changes_no_bit(config_file, tmp_path):
    """It leaves on SIGTERM, and the run has its first size again."""
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    settings = ("elastic.max_replicas=3", SPARE)
    process = start("--config", config_file, *SETTINGS, *settings, launcher=(*TORCHRUN, "5"))
    wait_for_step(run, 1)
    wait_for_change(run, 1)
    wait_for_step(run, len(metrics(run)) + 3)
    kill(run, 4, signal.SIGTERM)
    wait_for_change(run, 2)
    losses, _ = stop_after(process, run, 3)
    assert [change["live"] for change in changes(run)] == [5, 4]
    process = start("--config", config_file, *SETTINGS, f"run.directory={undisturbed}")
    wait_for_step(undisturbed, len(losses) - 3)
    others, _ = stop_after(process, undisturbed, 3)
    assert min(len(losses), len(others)) > 6 and all(ours == theirs for ours, theirs in zip(losses, others))
