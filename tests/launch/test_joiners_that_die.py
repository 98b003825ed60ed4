"""Real training in which workers die while they join it, or the one that sends them state does. Sums are exact."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.launch.test_returning_workers import TORCHRUN, changes, kill, stop_after
from tests.support.launch_runs import PATIENCE_S, finish, metrics, start, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.full]
SETTINGS = ("run.num_steps=100000", "precision.sums=exact", "lr_schedule.kind=constant")
STRIKE_STEP = 3
PHASES = ("build", "recovery_report", "recovery_moves", "recovery_confirm", "recovery_groups")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns the losses of at least so many steps of one process; all layouts here have the same."""
    folder, known = tmp_path_factory.mktemp("undisturbed"), list[float]()

    def losses(config_file, num_steps):
        if len(known) < num_steps:
            run = folder / f"{num_steps}"
            layout = ("parallel.pp_size=1", "parallel.dp_size=1", f"run.num_steps={2 * num_steps}")
            code, out, err = finish(start("--config", config_file, *SETTINGS[1:], *layout, f"run.directory={run}"))
            assert code == 0, out + err
            known[:] = [line["loss"] for line in metrics(run)]
        return known[:num_steps]

    return losses


def wait_until_joined(process, run, rank):
    """Waits until this worker is a member and no place is vacant; returns the changes of membership."""
    deadline = time.monotonic() + PATIENCE_S
    while rank not in joined_in(found := changes(run)):
        assert time.monotonic() < deadline and process.poll() is None, f"rank {rank} never joined: {found}"
        time.sleep(0.05)
    assert (found[-1]["live"], found[-1]["lost"]) == (found[-1]["places"], 0)
    return found


def joined_in(found):
    return [each["rank"] for change in found for each in change["joined"]]


def worker_pid(run, rank):
    log = (run / "logs" / f"rank-{rank}.log").read_text()
    return int(re.findall(r"is process (\d+)", log)[0])


def died_by_fault(run, rank):
    return "injected fault: kill" in (run / "logs" / f"rank-{rank}.log").read_text()


@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize(
    ("launcher", "phase"),
    [
        *(pytest.param((), phase, id=f"plain-{phase}") for phase in PHASES),
        *(pytest.param((*TORCHRUN, "4"), phase, id=f"torchrun-{phase}") for phase in PHASES[::2]),
    ],
)
def test_a_joiner_that_dies_is_replaced_and_changes_no_bit(config_file, tmp_path, undisturbed, launcher, phase):
    """Rank 3 dies, rank 4 is to take its place and dies on the way, rank 5 takes it."""
    run = tmp_path / "run"
    faults = [{"rank": 3, "step": STRIKE_STEP}, {"joiner": 1, "step": 1, "phase": phase}]
    settings = (*SETTINGS, "elastic.max_rejoins=3", f"elastic.faults={json.dumps(faults)}")
    process = start("--config", config_file, *settings, launcher=launcher)
    wait_for_step(run, STRIKE_STEP)
    found = wait_until_joined(process, run, 5)
    losses, out = stop_after(process, run, 3)
    assert died_by_fault(run, 3) and died_by_fault(run, 4)
    was_member = 4 in joined_in(found)
    assert was_member == (phase == "recovery_groups")
    assert (out.count("does not join: killed by SIGKILL"), out.count(": lost rank 4")) == (
        (1, 0) if phase == "build" else (0, 1)
    ), out
    assert losses == undisturbed(config_file, len(losses))


@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize(
    ("launcher", "source", "phase"),
    [
        pytest.param((), 0, "recovery_moves", id="plain-leader-recovery_moves"),
        pytest.param((), 1, "recovery_confirm", id="plain-other-recovery_confirm"),
        pytest.param((*TORCHRUN, "3"), 1, "recovery_moves", id="torchrun-other-recovery_moves"),
    ],
)
def test_the_source_of_a_joiners_state_dies(config_file, tmp_path, undisturbed, launcher, source, phase):
    """Rank 2 dies; ranks 0 and 1 hold the state that rank 3 is sent. One of them dies meanwhile, and rank 4 replaces
    it. The first fault waits for a recovery after the next step, so it is not that from the loss of rank 2."""
    run = tmp_path / "run"
    faults = [{"rank": 2, "step": STRIKE_STEP}, {"rank": source, "step": STRIKE_STEP + 2, "phase": phase}]
    layout = ("parallel.pp_size=1", "parallel.dp_size=3", "batch.global_batch_size=8")
    settings = (*SETTINGS, *layout, "elastic.max_rejoins=3", f"elastic.faults={json.dumps(faults)}")
    process = start("--config", config_file, *settings, launcher=launcher)
    wait_for_step(run, STRIKE_STEP)
    found = wait_until_joined(process, run, 4)
    losses, _ = stop_after(process, run, 3)
    assert died_by_fault(run, 2) and died_by_fault(run, source)
    (first, *_), joins = found, [change for change in found if change["joined"]]
    assert [each["rank"] for each in first["who"]] == [2]
    assert [[each["rank"] for each in change["joined"]] for change in joins] == [[3], [4]]
    assert [each["rank"] for each in joins[0]["who"]] == [source], "it did not die while rank 3 joined"
    assert losses == undisturbed(config_file, len(losses))


@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("victim", ["worker", "guardian"])
def test_one_return_under_torchrun(config_file, tmp_path, undisturbed, victim):
    """elastic.max_rejoins 1: the place is taken once more, by the worker's guardian or by the next one in its place."""
    run = tmp_path / "run"
    process = start("--config", config_file, *SETTINGS, "elastic.max_rejoins=1", launcher=(*TORCHRUN, "4"))
    wait_for_step(run, STRIKE_STEP)
    if victim == "worker":
        kill(run, 3)
    else:
        status = Path(f"/proc/{worker_pid(run, 3)}/status").read_text()
        os.kill(int(re.findall(r"PPid:\s+(\d+)", status)[0]), signal.SIGKILL)
    found = wait_until_joined(process, run, 4)
    losses, _ = stop_after(process, run, 3)
    assert [[each["rank"] for each in change["who"]] for change in found] == [[3], []]
    assert losses == undisturbed(config_file, len(losses))
