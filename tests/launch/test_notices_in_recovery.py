"""A host gets its notice while the others recover from a loss: real training, in each phase of the recovery."""

import json
import os
import signal

import pytest

from tests.launch.test_relayed_training import FOUR, NUM_STEPS, STRIKE_STEP, start_ranks
from tests.support.launch_runs import count_events, finish, metrics, wait_for_event, wait_for_step, workers_of
from tests.support.processes import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.full]
UNDISTURBED = (f"run.num_steps={NUM_STEPS}", "precision.sums=exact")
LOST = 2
"""Stage 1 of the first replica; what is left of its stage is rank 3."""


def losses(run):
    return [line["loss"] for line in metrics(run)]


def membership(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == "membership"]


@pytest.mark.sample(0, rest=2)
@pytest.mark.parametrize("phase", ["recovery_report", "recovery_groups", "recovery_moves", "recovery_confirm"])
@pytest.mark.parametrize("noticed", [0, 1])
def test_a_notice_in_each_phase_of_a_recovery_changes_no_bit(config_file, tmp_path, undisturbed, phase, noticed):
    """Rank 1 holds the recovery up; the coordinator's host or its own gets a notice. Both leave, and no step is
    missing."""
    run = tmp_path / "noticed"
    stubs = start_ranks(config_file, run, FOUR, phase, 'elastic.notice={"signal": "USR1"}', hosts="abcd")
    wait_for_step(run, STRIKE_STEP + 2)
    (worker,) = workers_of(stubs[LOST].pid)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: (tmp_path / "dawdling-1").exists(), "rank 1 to come to the phase")
    stubs[noticed].send_signal(signal.SIGUSR1)
    wait_for_event(run, "preemption")
    (tmp_path / "struck").touch()
    ends = [finish(stub) for stub in stubs]
    assert [code for code, _, _ in ends] == [0, 0, 0, 0], ends
    changes = membership(run)
    gone = [each["rank"] for change in changes for each in change["who"]]
    assert sorted(gone) == sorted([LOST, noticed]) and not any(change["joined"] for change in changes), changes
    assert [line["step"] for line in metrics(run)] == list(range(1, NUM_STEPS + 1))
    assert losses(run) == undisturbed(config_file)
    attempts = [line["num_attempts"] for line in metrics(run) if "num_attempts" in line]
    assert attempts in ([], [2]), "only the step of the loss may have been begun twice"
    assert count_events(run, "preemption") == 1
