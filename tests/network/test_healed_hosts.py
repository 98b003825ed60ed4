"""Hosts that were cut off come back by themselves once the network has healed, and no loss changes by a bit."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.network_hosts import network_of
from tests.support.network_runs import CONTROL_S, NetworkRun
from tests.support.network_switch import Weather

pytestmark = [pytest.mark.slow, pytest.mark.full]
SETTINGS = dict(num_steps=100_000)
SLOW = Weather(delay_s=0.01)
"""So that a run of a minute has some hundred steps."""


def stop(run: NetworkRun, num_steps: int) -> list[float]:
    """Stops a run after `num_steps` steps; returns its losses."""
    run.wait_for_step(num_steps)
    run.processes[-2:][0].send_signal(signal.SIGINT)
    ended = run.end()
    assert {each.code for each in ended} == {130}, ended
    assert run.steps() == list(range(1, len(run.steps()) + 1)), "a step is missing, or recorded twice"
    return run.losses()


@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("number", [3, 1])
def test_a_host_that_was_cut_off_comes_back(start, tmp_path_factory, text, number):
    """A worker's host is evicted; without the coordinator's host another one takes over."""
    run = start(3, weather=SLOW, max_rejoins=3, **SETTINGS)
    run.wait_for_step(5)
    run.network.cut_host(number)
    assert run.wait_for_change(1)["live"] == 2
    run.network.weather = SLOW
    change = run.wait_for_change(2)
    (joined,) = change["joined"]
    assert change["live"] == 3 and joined["rank"] >= 3, run.notices()  # on a starved machine not at the first try
    losses = stop(run, len(run.steps()) + 5)
    assert len(run.changes()) == 2
    with network_of(1) as network:  # exact sums: one rank makes the same run
        folder = tmp_path_factory.mktemp("undisturbed")
        undisturbed = stop(NetworkRun(network, folder, launcher="variables", text=text, **SETTINGS), len(losses))
    assert losses == undisturbed[: len(losses)]


@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("share", [0.8, 0.9, 1.0])
def test_a_cut_of_about_the_runs_patience_costs_at_most_a_host(start, share):
    """TCP tries again at ever longer intervals: after such a cut either end, or neither, has given the other one up."""
    run = start(3, weather=SLOW, max_rejoins=3, **SETTINGS)
    run.wait_for_step(5)
    run.network.cut_host(3)
    time.sleep(share * CONTROL_S)
    run.network.weather = SLOW
    until_s = time.monotonic() + 3 * CONTROL_S  # an end that gives up does so within this time
    run.wait_until(lambda: time.monotonic() > until_s and run.num_live() == 3, "three workers")
    assert len(run.changes()) in (0, 2), run.notices()
    stop(run, len(run.steps()) + 5)


def test_a_host_that_may_not_come_back_ends(start):
    run = start(3, weather=SLOW, max_rejoins=3, return_s=0.0, **SETTINGS)
    run.wait_for_step(5)
    run.network.cut_host(3)
    assert run.wait_for_change(1)["live"] == 2
    assert run.processes[2].wait(timeout=300) == 4
    for process in run.processes[:2]:
        process.send_signal(signal.SIGINT)
    assert [each.code for each in run.end()] == [130, 130, 4]
