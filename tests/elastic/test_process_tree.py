"""Guardians and coordinators that are killed or stopped, with real processes: the run goes on without what they take
along, and no process is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.elastic.test_members import end, wait_for_step
from tests.elastic.test_takeover import end_all, metrics
from tests.support.launch_runs import child_of
from tests.support.member_processes import start, start_on_hosts
from tests.support.processes import wait_for

pytestmark = pytest.mark.slow
NUM_STEPS = 200
ALL_STEPS = list(range(1, NUM_STEPS + 1))
LASTING = dict(num_steps=300, step_s=0.04, control_s=10.0)
"""A run of twice the time after which a process that is stopped is killed, on a machine where others may be slow."""
LASTING_STEPS = list(range(1, LASTING["num_steps"] + 1))


def strike(process: subprocess.Popen[str], name: str, number: int = signal.SIGKILL) -> None:
    """Sends a signal to the guardian or the coordinator of a stub."""
    os.kill(child_of(process.pid, name), number)


def text_of(directory: Path) -> str:
    return (directory / "metrics.jsonl").read_text()


def test_on_one_host_a_killed_coordinator_is_replaced(tmp_path):
    process = start(tmp_path, num_steps=NUM_STEPS)
    wait_for_step(tmp_path, 5)
    strike(process, "coordinator")
    ended = end(process, tmp_path)
    assert (ended.code, ended.err, ended.steps) == (0, "", ALL_STEPS), ended
    assert [change["live"] for change in ended.changes] == [4] and ended.changes[0]["who"] == []
    assert "the run goes on with a new coordinator on " in ended.out
    assert json.loads((tmp_path / "summary.json").read_text())["exit_code"] == 0


@pytest.mark.full
def test_the_replacement_is_replaced_and_then_a_worker_is_lost(tmp_path):
    process = start(tmp_path, num_steps=2 * NUM_STEPS, faults=[[3, "step", 300, "kill"]])
    for step, number in ((5, 1), (100, 2)):
        wait_for_step(tmp_path, step)
        strike(process, "coordinator")
        wait_for(lambda: text_of(tmp_path).count("with a new coordinator") == number, "the successor")  # noqa: B023
    ended = end(process, tmp_path)
    assert (ended.code, ended.err, ended.steps) == (0, "", list(range(1, 2 * NUM_STEPS + 1))), ended
    assert [change["live"] for change in ended.changes] == [4, 4, 3]


@pytest.mark.full
def test_a_stopped_coordinator_is_killed_and_replaced(tmp_path):
    process = start(tmp_path, **LASTING)
    wait_for_step(tmp_path, 5)
    strike(process, "coordinator", signal.SIGSTOP)
    ended = end(process, tmp_path)
    assert (ended.code, ended.err, ended.steps) == (0, "", LASTING_STEPS), ended
    assert [change["live"] for change in ended.changes] == [4]


def test_without_its_only_guardian_a_run_ends_as_one_that_has_lost_all_workers(tmp_path):
    process = start(tmp_path, num_steps=100_000)
    wait_for_step(tmp_path, 5)
    strike(process, "guardian")
    ended = end(process, tmp_path)
    assert ended.code == 3 and ended.err.startswith("the run can't go on: stage 0 has no replica left"), ended
    assert "Traceback" not in ended.err + ended.out


@pytest.mark.parametrize("number", [2, pytest.param(0, marks=pytest.mark.full)])
def test_a_killed_guardian_takes_its_worker_along_and_its_stub_stays(tmp_path, number):
    """As under torchrun; the coordinator is the child of the first stub."""
    processes = start_on_hosts(tmp_path, ["a"] * 4, num_steps=NUM_STEPS)
    wait_for_step(tmp_path, 5)
    strike(processes[number], "guardian")
    codes, _, errs = end_all(processes, tmp_path)
    assert (codes, errs) == ([0] * 4, [""] * 4)
    steps, changes = metrics(tmp_path)
    assert steps == ALL_STEPS and [change["live"] for change in changes] == [3]
    assert [gone["rank"] for gone in changes[0]["who"]] == [number]


@pytest.mark.full
def test_a_stopped_guardian_is_killed_by_its_stub(tmp_path):
    processes = start_on_hosts(tmp_path, ["a"] * 4, **LASTING)
    wait_for_step(tmp_path, 5)
    strike(processes[2], "guardian", signal.SIGSTOP)
    codes, _, errs = end_all(processes, tmp_path)
    assert (codes, errs) == ([0] * 4, [""] * 4)
    steps, changes = metrics(tmp_path)
    assert steps == LASTING_STEPS and [change["live"] for change in changes] == [3]


@pytest.mark.full
def test_a_guardian_and_then_the_coordinator_are_killed(tmp_path):
    """The guardian that replaces the first one's asks for the failover coordinator."""
    processes = start_on_hosts(tmp_path, ["a"] * 4, num_steps=400)
    wait_for_step(tmp_path, 5)
    strike(processes[0], "guardian")
    wait_for(lambda: '"event": "membership"' in text_of(tmp_path), "the change")
    strike(processes[0], "coordinator")
    codes, _, errs = end_all(processes, tmp_path)
    assert (codes, errs) == ([0] * 4, [""] * 4)
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 401)) and [change["live"] for change in changes] == [3, 3]


def test_on_three_hosts_a_killed_coordinator_is_replaced_where_it_was(tmp_path):
    processes = start_on_hosts(tmp_path, ["a", "b", "c"], num_steps=NUM_STEPS)
    wait_for_step(tmp_path, 5)
    strike(processes[0], "coordinator")
    codes, outs, errs = end_all(processes, tmp_path)
    assert (codes, errs) == ([0] * 3, [""] * 3)
    steps, changes = metrics(tmp_path)
    assert steps == ALL_STEPS and [change["live"] for change in changes] == [3]
    assert "with a new coordinator on a" in outs[0] and outs[1:] == ["", ""]


@pytest.mark.full
def test_a_witness_is_free_for_the_successor(tmp_path):
    processes = start_on_hosts(tmp_path, ["a", "b"], num_steps=2 * NUM_STEPS, witness=str(tmp_path / "witness"))
    wait_for_step(tmp_path, 5)
    strike(processes[0], "coordinator")
    wait_for(lambda: "with a new coordinator on a" in text_of(tmp_path), "the successor")
    processes[0].kill()
    codes, _, errs = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, 0] and errs[1] == ""
    assert metrics(tmp_path)[0] == list(range(1, 2 * NUM_STEPS + 1))


@pytest.mark.full
def test_the_coordinator_is_lost_in_a_recovery(tmp_path):
    process = start(tmp_path, num_steps=NUM_STEPS, faults=[[3, "step", 5, "kill"], [1, "confirm", 1, "dawdle"]])
    wait_for(lambda: (tmp_path / "dawdling-1").exists(), "the recovery")
    strike(process, "coordinator")
    (tmp_path / "struck").touch()
    ended = end(process, tmp_path)
    assert (ended.code, ended.err, ended.steps) == (0, "", ALL_STEPS), ended
    assert [change["live"] for change in ended.changes] == [3]
