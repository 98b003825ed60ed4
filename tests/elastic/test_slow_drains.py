"""Real workers that are too slow to be of use leave, and their places are taken again after a probation."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.elastic.test_members import end, pid_of, wait_for_step
from tests.elastic.test_preempted_hosts import events
from tests.elastic.test_rejoins import assert_came_back
from tests.elastic.test_takeover import metrics
from tests.support.member_processes import start
from tests.support.processes import alive, wait_for

pytestmark = pytest.mark.slow
LAYOUT = [1, 4, 1]


def joins(directory, rank):
    return any(each["rank"] == rank for change in metrics(directory)[1] for each in change["joined"])


def test_a_slow_worker_leaves_and_another_one_comes(tmp_path):
    """Another worker dies in the very step in which it asks; each has its own way back."""
    faults = [[3, "step", 5, "slow"], [2, "step", 5, "kill"]]
    process = start(tmp_path, layout=LAYOUT, num_steps=700, max_rejoins=1, probation_s=3.0, faults=faults)
    wait_for(lambda: (tmp_path / "pid-5").exists(), "both to come back")
    ended = end(process, tmp_path)
    assert_came_back(ended, [4], [5], num_steps=700)
    (event,) = events(tmp_path, "drain")
    assert event["ranks"] == [3] and event["text"] in ended.out
    assert event["text"].startswith("rank 3 is slow; it leaves at the next step boundary, after step 5")
    assert "(pp0 dp3 tp0) has left" in ended.out and "lost rank 3" not in ended.out


@pytest.mark.full
def test_one_that_is_slow_again_leaves_again(tmp_path):
    faults = [[3, "step", 5, "slow"], [4, "step", 200, "slow"]]
    process = start(tmp_path, layout=LAYOUT, num_steps=100_000, max_rejoins=2, probation_s=1.0, faults=faults)
    wait_for_step(tmp_path, 5)
    wait_for(lambda: joins(tmp_path, 5), "the second one to come back")
    process.send_signal(signal.SIGINT)
    ended = end(process, tmp_path)
    assert ended.err.startswith("stopped after step ")
    assert [change["live"] for change in ended.changes] == [3, 4, 3, 4]
    assert [event["ranks"] for event in events(tmp_path, "drain")] == [[3], [4]]


def test_it_does_not_come_back_without_rejoins(tmp_path):
    process = start(tmp_path, layout=LAYOUT, num_steps=200, probation_s=0.1, faults=[[3, "step", 5, "slow"]])
    ended = end(process, tmp_path)
    assert (ended.code, ended.err) == (0, "") and ended.steps == list(range(1, 201))
    assert [change["live"] for change in ended.changes] == [3]


@pytest.mark.full
def test_the_coordinator_is_lost_before_a_slow_worker_leaves(tmp_path):
    """The leader holds up the step after which it should: the next coordinator hears of it, and it comes back."""
    faults = [[3, "step", 20, "slow"], [0, "step", 20, "dawdle"]]
    process = start(tmp_path, layout=LAYOUT, num_steps=100_000, max_rejoins=1, probation_s=1.0, faults=faults)
    wait_for(lambda: (tmp_path / "dawdling-0").exists(), "the leader")
    wait_for(lambda: events(tmp_path, "drain"), "the request")
    found = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(process.pid)], capture_output=True, text=True)
    (coordinator,) = [line.split()[0] for line in found.stdout.splitlines() if "p3d-coord" in line]
    os.kill(int(coordinator), signal.SIGKILL)
    (tmp_path / "struck").touch()
    wait_for(lambda: joins(tmp_path, 4), "the return")
    process.send_signal(signal.SIGINT)
    ended = end(process, tmp_path)
    assert len(events(tmp_path, "drain")) == 1 and ended.changes[-1]["live"] == 4


def test_the_run_needs_the_slow_worker(tmp_path):
    """The only other replica is gone."""
    faults = [[1, "step", 5, "kill"], [0, "step", 40, "slow"]]
    process = start(tmp_path, layout=[1, 2, 1], num_steps=80, max_rejoins=0, probation_s=0.1, faults=faults)
    ended = end(process, tmp_path)
    assert (ended.code, ended.err) == (0, "") and ended.steps == list(range(1, 81))
    assert "rank 0 is slow; but the run needs it: without, stage 0 has no replica left" in ended.out
    assert events(tmp_path, "drain") == []


@pytest.mark.full
def test_one_that_stays_after_all_is_not_replaced_when_it_leaves_later(tmp_path):
    """The other replica dies before it could leave. By a command it leaves for good."""
    faults = [[1, "step", 20, "slow"], [0, "step", 20, "dawdle"]]
    process = start(tmp_path, layout=[1, 2, 1], num_steps=1_000, max_rejoins=2, probation_s=0.1, faults=faults)
    wait_for(lambda: (tmp_path / "dawdling-0").exists(), "the leader")
    wait_for(lambda: events(tmp_path, "drain"), "the request")
    os.kill(pid_of(tmp_path, 0), signal.SIGKILL)
    wait_for(lambda: joins(tmp_path, 2), "the other one's return")
    wait_for_step(tmp_path, len(metrics(tmp_path)[0]) + 5)
    os.kill(pid_of(tmp_path, 1), signal.SIGTERM)
    wait_for(lambda: not alive(pid_of(tmp_path, 1)), "its end")
    ended = end(process, tmp_path)
    assert (ended.code, ended.err) == (0, "") and ended.steps == list(range(1, 1_001))
    assert "rank 1 (pp0 dp1 tp0) stays after all" in ended.out
    assert [change["live"] for change in ended.changes] == [1, 2, 1] and ended.changes[-1]["joined"] == []
