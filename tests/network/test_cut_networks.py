"""Real training on hosts whose network is cut, slow or lossy: the right side goes on, the other ends with code 4.

Hosts are network namespaces (tests/support/network_hosts.py). Host 1 has rank 0 and the coordinator.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest

from parallel3d.monitor.run_folder import SUMMARY
from tests.support.network_runs import LAUNCHERS, NUM_STEPS, SEEN_BY_TORCHRUN, Ended, NetworkRun
from tests.support.network_switch import Weather

pytestmark = pytest.mark.slow
LISTENING, ANY_ADDRESS = "0A", "00000000"


def assert_one_side_finished(run: NetworkRun, ended: list[Ended], undisturbed: list[float]) -> None:
    """Each step is recorded once, with the right loss, the last checkpoint written once, and the summary is its."""
    assert run.steps() == list(range(1, NUM_STEPS + 1))
    assert run.losses() == undisturbed
    assert sum(each.out.count(f"saved step {NUM_STEPS}:") for each in ended) == 1, ended
    summary = json.loads((run.directory / SUMMARY).read_text())
    assert (summary["exit_code"], summary["last_step"]) == (0, NUM_STEPS), "the side that lost has written it"


def codes(ended: list[Ended]) -> list[int]:
    return [each.code for each in ended]


def lost_ranks(run: NetworkRun) -> list[int]:
    return [who["rank"] for change in run.changes() for who in change["who"]]


@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.full)])
def test_one_host_of_three_is_cut_off(start, undisturbed, number):
    run = start(3)
    run.wait_for_step(5)
    run.network.cut_host(number)
    ended = run.end()
    assert codes(ended) == [4 if host == number else 0 for host in (1, 2, 3)], ended
    assert "the run can't go on here: this side reaches 1 of 3 hosts" in ended[number - 1].out
    assert_one_side_finished(run, ended, undisturbed)
    assert lost_ranks(run) == [number - 1]


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("has_witness", [False, True])
def test_two_hosts_are_cut_apart(start, tmp_path, undisturbed, has_witness):
    """The coordinator's host goes on: it holds the witness, or needs none. The other one doesn't begin again later."""
    run = start(2, witness=str(tmp_path / "witness") if has_witness else None)
    run.wait_for_step(5)
    run.network.cut_host(1)
    ended = run.end()
    assert codes(ended) == [0, 4], ended
    why = f"the witness {tmp_path / 'witness'} " if has_witness else "no witness is configured"
    assert f"the run can't go on here: this side reaches 1 of 2 hosts, and {why}" in ended[1].out
    assert_one_side_finished(run, ended, undisturbed)


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("num_hosts, has_witness, expected", [(2, True, 0), (2, False, 4), (3, False, 0)])
def test_all_processes_of_the_coordinators_host_are_killed(
    start, tmp_path, undisturbed, num_hosts, has_witness, expected
):
    run = start(num_hosts, witness=str(tmp_path / "witness") if has_witness else None)
    run.wait_for_step(5)
    run.network.hosts[0].kill_all()
    ended = run.end()
    assert codes(ended) == [-signal.SIGKILL] + [expected] * (num_hosts - 1), ended
    if expected == 0:
        assert_one_side_finished(run, ended, undisturbed)
    else:
        assert not run.changes() and NUM_STEPS not in run.steps()


@pytest.mark.full
def test_all_processes_of_another_host_are_killed(start, undisturbed):
    run = start(3)
    run.wait_for_step(5)
    run.network.hosts[1].kill_all()
    ended = run.end()
    assert codes(ended) == [0, -signal.SIGKILL, 0], ended
    assert_one_side_finished(run, ended, undisturbed)
    assert lost_ranks(run) == [1]


WAYS = tuple(itertools.product((2, 3), LAUNCHERS, (False, True)))
"""Numbers of hosts, launchers, without and with a witness."""
DATA_PATHS = {"both directions": {(2, 3), (3, 2)}, "one direction": {(2, 3)}}


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("cut", DATA_PATHS)
def test_two_hosts_reach_the_coordinator_but_not_each_other(start, undisturbed, cut):
    run = start(3)
    run.wait_for_step(5)
    run.network.weather = Weather(cut=frozenset(DATA_PATHS[cut]))
    ended = run.end()
    assert codes(ended) == [0, 0, 0], ended
    assert_one_side_finished(run, ended, undisturbed)
    (change,) = run.changes()
    assert change["why"].startswith("lost rank 2: evicted: host2 and host3 can't reach each other")


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_hosts_that_never_reach_each_other_are_named(start, launcher):
    """As behind a firewall: the run ends instead of training on a part of its hosts. All reach torchrun's store."""
    run = start(3, launcher, weather=Weather(cut=frozenset(DATA_PATHS["both directions"])))
    ended = run.end()
    assert codes(ended) == [3, 3, 3], ended
    assert (launcher == "torchrun") == any(SEEN_BY_TORCHRUN.findall(each.out) for each in ended), ended
    assert "before the first step, host2 and host3 can't reach each other: does a firewall" in ended[0].out
    assert not run.steps()


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("killed, reached", [(1, []), (0, [1])])
def test_a_cut_during_a_recovery(start, undisturbed, killed, reached):
    """A worker is killed; while a survivor pauses in the recovery, host 3 is cut off from host 2, or from both."""
    at = dict(step=6, rank=killed, phase="forward")
    pause = dict(step=6, rank=1 - killed, phase="recovery_moves", kind="sleep", seconds=3.0)
    run = start(3, faults=[at, pause], zero_stage=0)
    run.wait_for_step(5)
    run.wait_for_worker_end(killed)
    run.network.cut(*((host, 3) for host in (1, 2) if host not in reached))
    ended = run.end()
    assert codes(ended) == [0, 0, 0 if reached else 4], ended
    assert_one_side_finished(run, ended, undisturbed)
    assert sorted(lost_ranks(run)) == [killed, 2]


@pytest.mark.full
def test_no_side_has_a_quorum(start):
    """One host is killed while another one is cut off: three sides of one host each, none of which may go on."""
    run = start(3)
    run.wait_for_step(5)
    run.network.cut_host(3)
    run.network.hosts[1].kill_all()
    ended = run.end()
    assert codes(ended) == [4, -signal.SIGKILL, 4], ended
    assert NUM_STEPS not in run.steps()


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("host", [1, 3])
def test_a_host_that_was_frozen_ends_itself(start, undisturbed, host):
    """Host 1 is the coordinator's: frozen, it keeps the run folder's lock, and what it would write at its end."""
    run = start(3)
    run.wait_for_step(5)
    frozen = run.network.hosts[host - 1].pids()
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 300
    while not run.changes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    ended = run.end()
    assert codes(ended) == [4 if number == host else 0 for number in (1, 2, 3)], ended
    assert_one_side_finished(run, ended, undisturbed)
    assert not any("can't write into" in each.out for each in ended), ended


@pytest.mark.full
@pytest.mark.sample(0, rest=2)
@pytest.mark.parametrize("num_hosts, launcher, has_witness", WAYS)
def test_a_delay_of_200_ms_is_only_slow(start, tmp_path, undisturbed, num_hosts, launcher, has_witness):
    run = start(num_hosts, launcher, num_steps=4, witness=str(tmp_path / "witness") if has_witness else None)
    run.network.weather = Weather(delay_s=0.2)
    ended = run.end()
    assert run.steps() == [1, 2, 3, 4] and not run.changes(), ended
    assert codes(ended) == [0] * num_hosts, ended
    assert run.losses() == pytest.approx(undisturbed[:4], rel=0.2)  # another learning rate schedule


@pytest.mark.full
@pytest.mark.sample(0, rest=2)
@pytest.mark.parametrize("num_hosts, launcher, has_witness", WAYS)
def test_thirty_percent_loss_ends_in_a_documented_way(start, tmp_path, num_hosts, launcher, has_witness):
    """Whichever hosts are lost by it, no step is recorded twice, and each host ends with 0, 3 or 4.

    It lasts for three steps or half a minute: the longer it lasts, the longer TCP waits before it sends again.
    """
    run = start(num_hosts, launcher, witness=str(tmp_path / "witness") if has_witness else None)
    run.wait_for_step(5)
    run.network.weather = Weather(loss=0.3)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and run.steps()[-1] < 8:
        time.sleep(0.05)
    run.network.weather = Weather()
    ended = run.end()
    assert run.steps() == list(range(1, len(run.steps()) + 1))
    assert set(codes(ended)) <= {0, 3, 4} and (0 in codes(ended)) == (NUM_STEPS in run.steps()), ended


@pytest.mark.full
def test_a_run_listens_at_the_interface_of_its_hosts_alone(start):
    run = start(2, num_steps=20_000)
    run.wait_for_step(2)
    for host in run.network.hosts:
        rows = [row.split() for row in Path(f"/proc/{host.holder.pid}/net/tcp").read_text().splitlines()[1:]]
        listening = {row[1].split(":")[0] for row in rows if row[3] == LISTENING}
        assert listening == {bytes(reversed([10, 77, 0, host.number])).hex().upper()}
    for process in run.processes:
        process.send_signal(signal.SIGINT)
    assert codes(run.end()) == [130, 130]
