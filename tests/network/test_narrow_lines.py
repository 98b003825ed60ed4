"""A host whose line is too narrow for the state that a joiner gets is not admitted, and the run goes on without it."""

import re
import signal

import pytest

from tests.support.network_switch import Weather

pytestmark = [pytest.mark.slow, pytest.mark.full]
NARROW = Weather(narrow_host=3, bytes_per_s=2**18)


def test_a_joiner_behind_a_narrow_line_stays_out(start):
    run = start(3, num_steps=100_000)
    run.wait_for_step(5)
    run.network.hosts[2].kill_all()
    assert run.wait_for_change(1)["live"] == 2
    run.network.weather = NARROW
    run.join(2)
    assert run.processes[2].wait(timeout=300) == 2
    run.wait_for_step(len(run.steps()) + 5)
    for process in run.processes[:2]:
        process.send_signal(signal.SIGINT)
    ended = run.end()
    assert [each.code for each in ended] == [130, 130, 2] and len(run.changes()) == 1, ended
    reason = "not admitted: the connection to the coordinator carries 0.[0-9]+ MiB/s, less than 1"
    assert re.search(reason, "\n".join(run.notices())), run.notices()
    assert re.search(reason, ended[2].out), ended
