"""Runs whose guardians reach the coordinator through a relay of their host, with real processes: what is struck costs
its own workers, and nothing is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.elastic.test_members import wait_for_step
from tests.elastic.test_takeover import end_all, metrics
from tests.support.launch_runs import child_of
from tests.support.member_processes import start_on_hosts
from tests.support.processes import wait_for
from tests.support.struck_worlds import StruckWorld

pytestmark = pytest.mark.slow
HOSTS = ["a", "a", "b", "b"]
NUM_STEPS = 300
ALL_STEPS = list(range(1, NUM_STEPS + 1))


def start(directory: Path, **spec: object) -> list[subprocess.Popen[str]]:
    """Two hosts of two ranks, each with a replica of both stages."""
    processes = start_on_hosts(
        directory, HOSTS, **{"layout": (1, 4, 1), "zero_stage": 0, "num_steps": NUM_STEPS, "relay_from": 4, **spec}
    )
    wait_for_step(directory, 5)
    return processes


def assert_end(directory: Path, processes: list[subprocess.Popen[str]], live: list[int]) -> None:
    """All ends well; `live` says how many workers each change of membership leaves."""
    codes, _, errs = end_all(processes, directory)
    assert (codes, errs) == ([0] * 4, [""] * 4)
    steps, changes = metrics(directory)
    assert steps == ALL_STEPS
    assert [change["live"] for change in changes] == live
    assert not StruckWorld(processes, directory).left_behind()


def relay_of(process: subprocess.Popen[str]) -> int:
    return child_of(process.pid, "relay")


def num_connections(pid: int) -> int:
    """The TCP connections of a process."""
    inodes = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists() or path.is_symlink()}
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(f"socket:[{line[9]}]" in inodes for line in lines if line[3] == "01")


def test_a_host_has_one_connection(tmp_path):
    processes = start(tmp_path)
    assert num_connections(child_of(processes[0].pid, "coordinator")) == 2
    assert num_connections(relay_of(processes[2])) == 1
    assert num_connections(child_of(processes[2].pid, "guardian")) == 0
    assert_end(tmp_path, processes, [])


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize(("number", "struck"), [(signal.SIGKILL, 0), (signal.SIGKILL, 2), (signal.SIGSTOP, 2)])
def test_a_lost_relay_costs_its_hosts_workers(tmp_path, number, struck):
    processes = start(tmp_path, num_steps=NUM_STEPS, step_s=0.05, control_s=4.0)
    os.kill(relay_of(processes[struck]), number)
    codes, _, errs = end_all(processes, tmp_path)
    assert (codes, errs) == ([0] * 4, [""] * 4)
    steps, changes = metrics(tmp_path)
    assert steps == ALL_STEPS and changes[-1]["live"] == 2
    lost = {gone["rank"] for change in changes for gone in change["who"]}
    assert lost == {struck, struck + 1}


@pytest.mark.full
def test_the_workers_of_a_lost_relay_come_back(tmp_path):
    processes = start(tmp_path, step_s=0.05, max_rejoins=3)
    os.kill(relay_of(processes[2]), signal.SIGKILL)
    codes, _, errs = end_all(processes, tmp_path)
    assert (codes, errs) == ([0] * 4, [""] * 4)
    steps, changes = metrics(tmp_path)
    assert steps == ALL_STEPS and changes[-1]["live"] == 4


@pytest.mark.full
def test_a_lost_guardian_costs_its_worker_alone(tmp_path):
    processes = start(tmp_path)
    os.kill(child_of(processes[3].pid, "guardian"), signal.SIGKILL)
    assert_end(tmp_path, processes, [3])


@pytest.mark.full
def test_a_stopped_guardian_costs_its_worker_alone(tmp_path):
    processes = start(tmp_path, step_s=0.05, control_s=4.0)
    os.kill(child_of(processes[2].pid, "guardian"), signal.SIGSTOP)
    assert_end(tmp_path, processes, [3])


@pytest.mark.full
def test_a_lost_coordinator_costs_nothing(tmp_path):
    processes = start(tmp_path)
    os.kill(child_of(processes[0].pid, "coordinator"), signal.SIGKILL)
    wait_for(lambda: "with a new coordinator" in (tmp_path / "metrics.jsonl").read_text(), "the successor")
    assert_end(tmp_path, processes, [4])


@pytest.mark.full
def test_a_lost_worker_comes_back_through_the_relay(tmp_path):
    processes = start(tmp_path, step_s=0.05, max_rejoins=3, faults=[[3, "step", 20, "kill"]])
    assert_end(tmp_path, processes, [3, 4])
