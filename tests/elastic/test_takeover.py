"""The coordinator's process is killed; who goes on, and who must not. Hosts are names: all run on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from parallel3d.elastic.coordinator.witness import Witness
from parallel3d.elastic.operator_link import reserve_place
from tests.elastic.test_members import wait_for_step
from tests.support.member_processes import start_on_hosts
from tests.support.processes import alive, pids, read_to_the_end, wait_for

pytestmark = pytest.mark.slow


def end_all(processes: list[subprocess.Popen[str]], directory: Path) -> tuple[list[int], list[str], list[str]]:
    """Returns (exit codes, stdouts, stderrs); no process of the world may be left."""
    outputs = [read_to_the_end(process) for process in processes]
    wait_for(lambda: not any(alive(pid) for pid in pids(directory)), "the last process to be gone")
    return [process.returncode for process in processes], [out for out, _ in outputs], [err for _, err in outputs]


def metrics(directory: Path) -> tuple[list[int], list[dict]]:
    """Returns (steps, changes of membership) as recorded."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()]
    steps = [line["step"] for line in lines if "event" not in line]
    return steps, [line for line in lines if line.get("event") == "membership"]


def test_three_hosts_go_on_without_the_first(tmp_path):
    processes = start_on_hosts(tmp_path, ["a", "b", "c"], num_steps=200)
    wait_for_step(tmp_path, 5)
    processes[0].kill()
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, 0, 0] and errs[1:] == ["", ""]
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 201)) and len(changes) == 1
    assert changes[0]["who"] == [{"rank": 0, "coordinates": "pp0 dp0 tp0"}]
    assert "the run goes on without its coordinator on a, from generation 0" in outs[1] and outs[2] == ""
    assert json.loads((tmp_path / "summary.json").read_text())["exit_code"] == 0


def test_a_successor_gives_no_number_again(tmp_path):
    """A command has got a number, and its worker has not said hello, when the coordinator is lost."""
    processes = start_on_hosts(tmp_path, ["a", "b", "c"], num_steps=300)
    wait_for_step(tmp_path, 5)
    assert reserve_place(tmp_path, None, "").rank == 3
    processes[0].kill()
    wait_for(lambda: metrics(tmp_path)[1], "the takeover")
    assert reserve_place(tmp_path, None, "").rank == 4
    codes, _, errs = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, 0, 0] and errs[1:] == ["", ""]
    assert not list(tmp_path.glob(".next_worker*"))


@pytest.mark.full
def test_two_hosts_and_a_witness_go_on_without_the_first(tmp_path):
    witness = str(tmp_path / "witness")
    processes = start_on_hosts(tmp_path, ["a", "b"], num_steps=200, witness=witness)
    wait_for_step(tmp_path, 5)
    processes[0].kill()
    codes, _, errs = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, 0] and errs[1] == ""
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 201)) and [change["live"] for change in changes] == [1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("witness", [None, "held"])
def test_two_hosts_without_a_witness_stop_without_the_first(tmp_path, witness):
    processes = start_on_hosts(tmp_path, ["a", "b"], num_steps=100_000, witness=witness and str(tmp_path / witness))
    wait_for_step(tmp_path, 5)
    if witness:  # by another process, as if the first host were alive
        (tmp_path / witness).unlink()
        holder = Witness(str(tmp_path / witness))
        assert holder.try_lock() == ""
    processes[0].kill()
    codes, _, errs = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, 4], errs
    why = "is held by another side" if witness else "no witness is configured (elastic.witness)"
    assert errs[1].startswith("the run can't go on here: this side reaches 1 of 2 hosts, and ") and why in errs[1]
    assert errs[1].count("\n") == 1 and metrics(tmp_path)[1] == []


@pytest.mark.full
def test_two_hosts_go_on_without_the_second(tmp_path):
    processes = start_on_hosts(tmp_path, ["a", "b"], num_steps=200)
    wait_for_step(tmp_path, 5)
    processes[1].kill()
    codes, outs, _ = end_all(processes, tmp_path)
    assert codes == [0, -signal.SIGKILL]
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 201)) and len(changes) == 1
    assert "lost rank 1 (pp0 dp1 tp0): lost in step " in outs[0] and "its guardian on b is gone" in outs[0]


@pytest.mark.full
def test_the_first_host_stops_when_most_others_are_out_of_reach(tmp_path):
    """They might go on without it."""
    processes = start_on_hosts(tmp_path, ["a", "b", "c", "d", "e"], num_steps=100_000, zero_stage=0)
    wait_for_step(tmp_path, 5)
    for rank in (2, 3, 4):  # none may agree to go on without the first that is killed
        for pid in map(int, (tmp_path / f"pid-{rank}").read_text().split()):
            os.kill(pid, signal.SIGSTOP)
    for process in processes[2:]:
        process.kill()
    codes, _, errs = end_all(processes, tmp_path)
    assert codes[:2] == [4, 4] and errs[0].startswith("the run can't go on here: this side reaches 2 of 5 hosts; ")


@pytest.mark.full
def test_a_successor_is_succeeded(tmp_path):
    processes = start_on_hosts(tmp_path, ["a", "b", "c", "d"], num_steps=500)
    for number, step in ((0, 5), (1, 150)):
        wait_for_step(tmp_path, step)
        processes[number].kill()
    codes, outs, _ = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 501)) and [change["live"] for change in changes] == [3, 2]
    assert "without its coordinator on a" in outs[1] and "without its coordinator on b" in outs[2]


@pytest.mark.full
def test_the_coordinator_and_its_failover_candidate_are_lost_together(tmp_path):
    processes = start_on_hosts(tmp_path, ["a", "b", "c", "d", "e"], num_steps=200, zero_stage=0)
    wait_for_step(tmp_path, 5)
    for process in processes[:2]:
        process.send_signal(signal.SIGSTOP)
    for process in processes[1::-1]:
        process.kill()
    codes, outs, _ = end_all(processes, tmp_path)
    assert codes[2:] == [0, 0, 0]
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 201)) and changes[-1]["live"] == 3


@pytest.mark.full
def test_a_lost_coordinator_takes_all_ranks_of_its_host_along(tmp_path):
    """Two ranks on each host; the guardian of rank 1 outlives the coordinator's, but not as a part of the run."""
    hosts = ["a", "a", "b", "b", "c", "c"]
    processes = start_on_hosts(tmp_path, hosts, num_steps=200, layout=[1, 6, 1], zero_stage=0)
    wait_for_step(tmp_path, 5)
    processes[0].kill()
    codes, _, errs = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, 4, 0, 0, 0, 0]
    assert errs[1] == "guardian of rank 1: the run's coordinator is gone\n"
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 201)) and [gone["rank"] for gone in changes[0]["who"]] == [0, 1]


@pytest.mark.full
def test_on_a_single_host_the_run_ends_with_its_coordinator(tmp_path):
    processes = start_on_hosts(tmp_path, ["a"] * 4, num_steps=100_000)
    wait_for_step(tmp_path, 5)
    processes[0].kill()
    codes, _, errs = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, 4, 4, 4]
    assert errs[1:] == ["guardian of rank 1: the run's coordinator is gone\n", "", ""]


@pytest.mark.full
def test_the_coordinator_is_lost_while_a_worker_is_replaced(tmp_path):
    """Rank 2 dies at once; rank 1 holds its confirmation back until the coordinator has gone, too."""
    faults = [[2, "step", 5, "kill"], [1, "confirm", 1, "dawdle"]]
    processes = start_on_hosts(tmp_path, ["a", "b", "c", "d"], num_steps=200, faults=faults)
    wait_for(lambda: (tmp_path / "dawdling-1").exists(), "the recovery")
    processes[0].kill()
    (tmp_path / "struck").touch()
    codes, _, _ = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, 0, 0, 0]  # the guardian of rank 2 stays to the end
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 201)) and len(changes) == 1
    assert sorted(gone["rank"] for gone in changes[0]["who"]) == [0, 2]


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [0, 2])
def test_a_host_that_is_told_to_go_hands_over(tmp_path, number):
    """Its guardian stays to the end, and its exit code is the run's. The coordinator moves with its host."""
    processes = start_on_hosts(tmp_path, ["a", "b", "c"], num_steps=200)
    wait_for_step(tmp_path, 5)
    processes[number].send_signal(signal.SIGTERM)
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [0, 0, 0] and errs == ["", "", ""]
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 201)) and [change["live"] for change in changes] == ([3, 2] if number == 0 else [2])
    assert f"rank {number} (pp0 dp{number} tp0) has left; 2 live" in outs[1 if number == 0 else 0]


def test_a_witness_that_somebody_holds_is_refused_at_the_start(tmp_path):
    holder = Witness(str(tmp_path / "witness"))
    assert holder.try_lock() == "" == holder.try_lock()
    (process,) = start_on_hosts(tmp_path / "run", ["a"], witness=str(tmp_path / "witness"))
    _, err = read_to_the_end(process)
    assert process.returncode == 2 and "witness is held by another side: set elastic.witness" in err
