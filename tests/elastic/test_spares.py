"""Workers beyond those of the grid wait, and take the places of lost ones; the run depends on none of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.elastic.test_members import end, pid_of, run, wait_for_step
from tests.elastic.test_rejoins import assert_came_back
from tests.elastic.test_takeover import end_all, metrics
from tests.support.member_processes import start, start_on_hosts
from tests.support.processes import wait_for

pytestmark = pytest.mark.slow
HOSTS = ["a", "b", "c", "d"]
"""The spare is on the last one."""


def test_a_spare_takes_the_place_of_a_lost_worker(tmp_path):
    ended = run(tmp_path, faults=[[3, "step", 5, "kill"]], num_steps=100, spares=1)
    assert_came_back(ended, [4], num_steps=100)
    assert " is a spare\n" in ended.out and "rank 4 (pp1 dp1 tp0) joins; 4 live, 0 spare, 0 lost" in ended.out


def test_a_spare_that_is_not_needed_ends_with_the_run(tmp_path):
    ended = run(tmp_path, spares=2)
    assert (ended.code, ended.err, ended.changes) == (0, "", []) and ended.steps == list(range(1, 21))


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, 1), (signal.SIGTERM, 0)])
def test_a_spare_that_ends_costs_the_run_nothing(tmp_path, number, said):
    process = start(tmp_path, num_steps=100, spares=1)
    wait_for_step(tmp_path, 5)
    os.kill(pid_of(tmp_path, 4), number)
    ended = end(process, tmp_path)
    assert (ended.code, ended.err, ended.changes) == (0, "", []) and ended.steps == list(range(1, 101))
    assert ended.out.count("rank 4 does not join: killed by SIGKILL") == said


def test_a_spare_outlives_the_coordinator(tmp_path):
    processes = start_on_hosts(tmp_path, HOSTS, num_steps=300, layout=(1, 3, 1), spares=1)
    wait_for_step(tmp_path, 5)
    wait_for(lambda: (tmp_path / "pid-3").exists(), "the spare")
    processes[0].kill()
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, 0, 0, 0], (outs, errs)
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 301)) and (changes[-1]["live"], changes[-1]["lost"]) == (3, 0)
    assert [each["rank"] for change in changes for each in change["joined"]] == [3], changes


def coordinator_of(stub: subprocess.Popen[str]) -> int:
    """The process of the coordinator that a stub has started."""
    children = Path(f"/proc/{stub.pid}/task/{stub.pid}/children").read_text().split()
    return next(int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "p3d-coordinator\n")


CUBE = (2, 2, 2)  # stage 0: 0 1 | 2 3, stage 1: 4 5 | 6 7


def test_a_spare_moves_to_another_stage(tmp_path):
    """Of two broken replicas ranks 1 and 4 are left: 4 builds what 1 lacks."""
    ended = run(tmp_path, faults=[[0, "step", 5, "kill"], [5, "step", 20, "kill"]], num_steps=200, layout=CUBE)
    assert (ended.code, ended.err) == (0, ""), ended
    assert ended.steps == list(range(1, 201))
    joined = [[each["rank"] for each in change["joined"]] for change in ended.changes]
    assert joined == [[], [], [1, 4]] and ended.changes[-1]["widths"] == [2, 1], ended.changes
    text = "rank 4 (pp1 dp0 tp0), now a spare, moves: it builds pp0 tp0"
    assert text in ended.out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (move,) = [line for line in lines if line.get("event") == "move"]
    del move["time"]
    assert move == {"event": "move", "text": text, "rank": 4, "coordinates": "pp1 dp0 tp0", "part": "pp0 tp0"}
    assert "rank 4 (pp0 dp0 tp0)" in ended.out


@pytest.mark.full
@pytest.mark.parametrize(("what", "says"), [("kill", "killed by SIGKILL"), ("fail", "ended with exit code 1")])
def test_a_spare_that_ends_while_it_builds_costs_the_run_nothing(tmp_path, what, says):
    faults = [[0, "step", 5, "kill"], [5, "step", 20, "kill"], [4, "build", 1, what]]
    ended = run(tmp_path, faults=faults, num_steps=200, layout=CUBE)
    assert (ended.code, ended.err) == (0, ""), ended
    assert ended.steps == list(range(1, 201)) and len(ended.changes) == 2
    assert f"rank 4 (new, pp0 tp0) does not join: {says}" in ended.out


@pytest.mark.full
def test_the_coordinator_is_lost_while_a_spare_moves(tmp_path):
    """Its successor does not wait for the spare, and lets it in once it has built its part."""
    faults = [[2, "step", 5, "kill"], [4, "step", 10, "kill"], [5, "build", 1, "dawdle"]]
    hosts = ["a", "a", "b", "b", "b", "b", "c", "c"]
    processes = start_on_hosts(tmp_path, hosts, num_steps=900, layout=CUBE, faults=faults)
    wait_for(lambda: (tmp_path / "dawdling-5").exists(), "the spare")
    os.kill(coordinator_of(processes[0]), signal.SIGKILL)
    wait_for(
        lambda: "the coordinator on a is lost" in (tmp_path / "metrics.jsonl").read_text(), "its successor's change"
    )
    wait_for_step(tmp_path, len(metrics(tmp_path)[0]) + 5)
    (tmp_path / "struck").touch()
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [0] * 8, (outs, errs)
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 901)) and changes[-1]["widths"] == [2, 1], changes
    assert [each["rank"] for each in changes[-1]["joined"]] == [3, 5], changes


@pytest.mark.full
def test_a_run_does_not_wait_for_its_spares(tmp_path):
    processes = start_on_hosts(tmp_path, HOSTS, num_steps=100, layout=(1, 3, 1), spares=1)
    processes[3].kill()
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [0, 0, 0, -signal.SIGKILL], (outs, errs)
    assert metrics(tmp_path) == (list(range(1, 101)), [])
