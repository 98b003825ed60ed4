"""Real training on hosts that are taken away, with a notice, and come back: no loss changes by a bit."""

from __future__ import annotations

import json
import random
import signal
import time
from functools import partial

import pytest

from tests.network.test_healed_hosts import SETTINGS, SLOW, stop
from tests.support.network_hosts import network_of
from tests.support.network_runs import NetworkRun

pytestmark = [pytest.mark.slow, pytest.mark.full]
NUM_HOSTS, NUM_NOTICES = 6, 3
PATIENT = dict(control_timeout_s=60.0, heartbeat_timeout={"min_s": 60.0, "max_s": 60.0})
"""Nothing falls silent here: on a busy machine no host or worker may be taken for lost."""


def live(run: NetworkRun) -> int:
    """How many workers train, by the newest change of membership."""
    return run.changes()[-1]["live"] if run.changes() else NUM_HOSTS


def is_back(run: NetworkRun, number: int) -> bool:
    """Whether all hosts train. One that could not join since this machine was too busy tries again: it was not admitted
    (exit code 2), its worker was taken for dead (3), or the coordinator for lost (4)."""
    if (code := run.processes[number].poll()) is not None:
        assert code in (2, 3, 4), code
        run.join(number)
    return live(run) == NUM_HOSTS


def test_spot_machines_come_and_go(start, tmp_path_factory, text):
    """Three of six hosts, the coordinator's first, have a notice at random steps and are killed once their workers have
    left; two seconds later each comes back and joins by the command."""
    chance = random.Random(1)
    run = start(NUM_HOSTS, weather=SLOW, notice={"signal": "USR1"}, **PATIENT, **SETTINGS)
    run.wait_for_step(3)
    victims = [0, *chance.sample(range(1, NUM_HOSTS), NUM_NOTICES - 1)]
    for victim in victims:
        run.wait_for_step(len(run.steps()) + chance.randrange(3, 12))
        run.processes[victim].send_signal(signal.SIGUSR1)
        run.wait_until(lambda: live(run) == NUM_HOSTS - 1, "the host to leave")
        run.network.hosts[victim].kill_all()
        time.sleep(2.0)
        run.join(victim)
        run.wait_until(partial(is_back, run, victim), "the host to come back")
    losses = stop(run, len(run.steps()) + 3)
    changes = run.changes()
    assert sorted(each["rank"] for change in changes for each in change["who"]) == sorted(victims)
    assert sum(len(change["joined"]) for change in changes) == NUM_NOTICES
    assert not any("lost" in change["why"] for change in changes), "a worker was lost, not drained"
    assert run.repeated_steps() == []
    with network_of(1) as network:  # exact sums: one rank makes the same run
        folder = tmp_path_factory.mktemp("undisturbed")
        undisturbed = stop(NetworkRun(network, folder, launcher="variables", text=text, **SETTINGS), len(losses))
    assert losses == undisturbed[: len(losses)]


def test_all_hosts_are_taken_away(start):
    """As at a job's time limit: the run has saved, and ends with the code for a requeue."""
    run = start(3, weather=SLOW, notice={"signal": "USR1", "deadline_s": 120.0}, **PATIENT, **SETTINGS)
    run.wait_for_step(5)
    for process in run.processes:
        process.send_signal(signal.SIGUSR1)
    assert [each.code for each in run.end()] == [7, 7, 7]
    (checkpoint,) = (run.directory / "checkpoints").glob("step-*")
    assert checkpoint.name == f"step-{run.steps()[-1]:08}"
    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["exit_code"] == 7 and "is taken away (SIGUSR1)" in summary["message"]
