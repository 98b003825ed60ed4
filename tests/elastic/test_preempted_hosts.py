"""Hosts get a notice that they will be taken away: their workers leave in time, and the coordinator moves.

Hosts are names: all processes run on this machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from parallel3d.elastic.drain_target import parse_drain_target
from parallel3d.elastic.operator_link import request_drain
from tests.elastic.test_members import end, pid_of, wait_for_step
from tests.elastic.test_takeover import end_all, metrics
from tests.support.member_processes import start, start_on_hosts
from tests.support.metadata_server import metadata_server
from tests.support.processes import alive, wait_for

pytestmark = pytest.mark.slow
USR1 = {"signal": "USR1"}


def events(directory: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()]
    return [line for line in lines if line.get("event") == kind]


def computed_steps(directory: Path, rank: int) -> list[int]:
    """The steps that a worker has begun, in order: one that was begun twice is there twice."""
    lines = (directory / "logs" / f"rank-{rank}.log").read_text().splitlines()
    return [int(line.removeprefix("begins step ")) for line in lines if line.startswith("begins step ")]


def assert_no_step_repeated(directory: Path, num_steps: int) -> None:
    steps, _ = metrics(directory)
    assert steps == list(range(1, num_steps + 1))
    for log in (directory / "logs").glob("rank-*.log"):
        begun = computed_steps(directory, int(log.stem.removeprefix("rank-")))
        assert begun == sorted(set(begun)), log.stem


@pytest.mark.full
def test_a_worker_host_leaves_without_a_repeated_step(tmp_path):
    processes = start_on_hosts(tmp_path, ["a", "b", "c"], num_steps=150, notice=USR1, max_rejoins=3)
    wait_for_step(tmp_path, 5)
    processes[2].send_signal(signal.SIGUSR1)
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [0, 0, 0] and errs == ["", "", ""]
    assert_no_step_repeated(tmp_path, 150)
    assert [change["live"] for change in metrics(tmp_path)[1]] == [2]
    (notice,) = events(tmp_path, "preemption")
    assert (notice["host"], notice["ranks"]) == ("c", [2]) and 25 <= notice["seconds"] <= 30
    text = "host c is taken away in 30 s (SIGUSR1): its workers leave at the next step boundary"
    assert text in outs[0] and "rank 2 (pp0 dp2 tp0) has left" in outs[0]


def test_the_coordinator_moves_away_from_its_host_without_a_repeated_step(tmp_path):
    """And from the next one: the witness does not stand in its way."""
    witness = str(tmp_path / "witness")
    processes = start_on_hosts(tmp_path, ["a", "b", "c"], num_steps=250, notice=USR1, witness=witness)
    wait_for_step(tmp_path, 5)
    processes[0].send_signal(signal.SIGUSR1)
    wait_for(lambda: len(metrics(tmp_path)[1]) >= 2, "the first host to leave")
    processes[1].send_signal(signal.SIGUSR1)
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [0, 0, 0] and errs == ["", "", ""]
    assert_no_step_repeated(tmp_path, 250)
    assert [change["live"] for change in metrics(tmp_path)[1]] == [3, 2, 2, 1]
    assert "the coordinator moves to b" in outs[0] and "the coordinator moves to c" in outs[1]
    assert "the run goes on with its coordinator on c, from generation" in outs[2]
    assert [event["host"] for event in events(tmp_path, "preemption")] == ["a", "b"]  # though told to each coordinator
    assert json.loads((tmp_path / "summary.json").read_text())["exit_code"] == 0


@pytest.mark.full
def test_the_coordinator_moves_to_a_host_that_stays(tmp_path):
    """The next one has a notice as well, and its worker has not left yet: rank 2 holds the step up."""
    faults = [[2, "step", 8, "dawdle"]]
    processes = start_on_hosts(tmp_path, ["a", "b", "c"], num_steps=100, notice=USR1, faults=faults, zero_stage=0)
    wait_for(lambda: (tmp_path / "dawdling-2").exists(), "the step")
    processes[1].send_signal(signal.SIGUSR1)
    wait_for(lambda: events(tmp_path, "preemption"), "the notice")
    processes[0].send_signal(signal.SIGUSR1)
    wait_for(lambda: len(events(tmp_path, "preemption")) == 2, "the other one")
    (tmp_path / "struck").touch()
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [0, 0, 0] and errs == ["", "", ""]
    assert_no_step_repeated(tmp_path, 100)
    assert "the coordinator moves to c" in outs[0] and outs[1] == ""


@pytest.mark.full
def test_the_old_host_is_taken_away_and_the_new_one_too(tmp_path):
    """The coordinator that has moved can be lost as any other."""
    processes = start_on_hosts(tmp_path, ["a", "b", "c", "d", "e"], num_steps=500, notice=USR1, zero_stage=0)
    wait_for_step(tmp_path, 5)
    processes[0].send_signal(signal.SIGUSR1)
    wait_for(lambda: len(metrics(tmp_path)[1]) >= 2, "the first host to leave")
    processes[0].kill()
    processes[1].kill()
    codes, outs, _ = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0, 0, 0]
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 501)) and changes[-1]["live"] == 3
    assert "the run goes on without its coordinator on b" in outs[2]


@pytest.mark.full
def test_the_next_coordinator_dies_before_it_serves(tmp_path):
    """The rest goes on with the one after it. Rank 1 reports last, so the move comes when this test lets it."""
    faults = [[1, "report", 1, "dawdle"]]
    processes = start_on_hosts(tmp_path, ["a", "b", "c", "d"], num_steps=200, notice=USR1, faults=faults, zero_stage=0)
    wait_for_step(tmp_path, 5)
    processes[0].send_signal(signal.SIGUSR1)
    wait_for(lambda: (tmp_path / "dawdling-1").exists(), "the change")
    processes[1].send_signal(signal.SIGSTOP)  # its stub starts no coordinator
    (tmp_path / "struck").touch()
    wait_for(lambda: "moves to b" in (tmp_path / "metrics.jsonl").read_text(), "the move")
    processes[1].kill()
    codes, outs, _ = end_all(processes, tmp_path)
    assert codes[1:] == [-signal.SIGKILL, 0, 0]
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 201)) and changes[-1]["live"] == 2


@pytest.mark.full
def test_the_coordinator_starts_on_another_host(tmp_path):
    processes = start_on_hosts(tmp_path, ["a", "b", "c"], num_steps=150, coordinator_host="c")
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [0, 0, 0] and errs == ["", "", ""]
    assert_no_step_repeated(tmp_path, 150)
    assert "the coordinator moves to c" in outs[0] and outs[1] == ""
    assert "the run goes on with its coordinator on c, from generation 0" in outs[2] and "written to" in outs[2]


@pytest.mark.full
def test_a_later_coordinator_stays_where_it_is(tmp_path):
    """It went to c, from where it was driven away, and does not go back when c has joined again."""
    options = dict(num_steps=600, coordinator_host="c", notice=USR1)
    processes = start_on_hosts(tmp_path, ["a", "b", "c"], **options)
    wait_for_step(tmp_path, 1)
    wait_for(lambda: "moves to c" in (tmp_path / "metrics.jsonl").read_text(), "the move")
    wait_for_step(tmp_path, len(metrics(tmp_path)[0]) + 5)
    processes[2].send_signal(signal.SIGUSR1)
    wait_for(lambda: metrics(tmp_path)[1] and metrics(tmp_path)[1][-1]["live"] == 2, "the host to leave")
    processes.append(start(tmp_path, layout=(1, 3, 1), joins=True, host="c", **options))
    wait_for(lambda: metrics(tmp_path)[1][-1]["live"] == 3, "the host to come back")
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [0, 0, 0, 0], errs
    notices = [event["text"] for event in events(tmp_path, "notice")]
    moves = [text for text in notices if "the coordinator moves" in text]
    assert len(moves) == 2 and moves[0].endswith(" c") and not moves[1].endswith(" c")
    assert not any("elastic.coordinator_host" in text for text in notices)  # nor does it look for it there


@pytest.mark.full
def test_a_host_of_that_name_is_not_there(tmp_path):
    processes = start_on_hosts(tmp_path, ["a", "b"], num_steps=50, coordinator_host="z")
    codes, outs, _ = end_all(processes, tmp_path)
    assert codes == [0, 0] and metrics(tmp_path)[1] == []
    assert "elastic.coordinator_host = 'z': no worker of the run is there; the coordinator stays on a" in outs[0]


def test_the_rest_can_not_go_on(tmp_path):
    """Both replicas of a stage are on hosts that are taken away: all end with the code for a requeue."""
    hosts = ["a", "b", "a", "b"]
    processes = start_on_hosts(tmp_path, hosts, layout=[2, 2, 1], num_steps=100_000, notice=USR1)
    wait_for_step(tmp_path, 5)
    for process in processes:
        process.send_signal(signal.SIGUSR1)
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [7, 7, 7, 7]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["exit_code"] == 7 and summary["message"].startswith("stopped after step ")
    out = "".join(outs)
    assert "is taken away (SIGUSR1): the run can't go on without, saves and ends with exit code 7" in out


@pytest.fixture
def announced(request, tmp_path):
    """A source that is polled: (fields of elastic.notice, a call that makes its notice come, the expected message)."""
    file = tmp_path / "notice"
    if request.param == "file":
        yield {"file": str(file)}, file.touch, f"{file} exists"
    elif request.param == "command":
        command = f"test -e '{file}' && echo spot price exceeded"
        yield {"command": command}, file.touch, "spot price exceeded"
    else:
        with metadata_server() as server:
            notice = {"cloud": request.param, "url": server.url, "deadline_s": 60.0}
            event = CLOUD_EVENTS[request.param]
            yield notice, lambda: setattr(server, "event", event), f"({request.param}: "
            assert not server.refused


CLOUD_EVENTS = {"aws": "terminate", "gcp": "preempted", "azure": "Preempt"}
"""Words of the cloud's metadata server."""
SOURCES = ["file", "command", *CLOUD_EVENTS]


@pytest.mark.full
@pytest.mark.parametrize("announced", SOURCES, indirect=True)
def test_a_run_without_a_launcher_ends(tmp_path, announced):
    """All its workers are on the host."""
    notice, send, told = announced
    process = start(tmp_path, num_steps=100_000, notice={**notice, "every_s": 0.1})
    wait_for_step(tmp_path, 5)
    assert not events(tmp_path, "preemption")
    send()
    ended = end(process, tmp_path)
    assert ended.code == 7 and f"host {os.uname().nodename} is taken away (" in ended.err and told in ended.err


@pytest.mark.full
@pytest.mark.parametrize("announced", ["command", "aws"], indirect=True)
def test_one_of_three_hosts_asks_and_leaves(tmp_path, announced):
    """Only the last host asks; its worker leaves, and no step is repeated."""
    notice, send, told = announced
    hosts = ["a", "b", "c"]
    processes = start_on_hosts(
        tmp_path, hosts, num_steps=250, notices=[{}, {}, {**notice, "every_s": 0.1}], max_rejoins=3
    )
    wait_for_step(tmp_path, 5)
    send()
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [0, 0, 0] and errs == ["", "", ""]
    assert_no_step_repeated(tmp_path, 250)
    assert [change["live"] for change in metrics(tmp_path)[1]] == [2]
    (event,) = events(tmp_path, "preemption")
    assert (event["host"], event["ranks"]) == ("c", [2]) and told in event["text"]
    assert "rank 2 (pp0 dp2 tp0) has left" in outs[0]


@pytest.mark.full
def test_a_host_that_does_not_leave_in_time_is_an_ordinary_loss(tmp_path):
    """Rank 0 holds the step up past the deadline."""
    faults = [[0, "step", 8, "dawdle"]]
    notice = {**USR1, "deadline_s": 3.0}
    processes = start_on_hosts(tmp_path, ["a", "b", "c"], num_steps=100, notice=notice, faults=faults)
    wait_for(lambda: (tmp_path / "dawdling-0").exists(), "the step")
    processes[2].send_signal(signal.SIGUSR1)
    wait_for(lambda: not alive(pid_of(tmp_path, 2)), "the deadline")
    (tmp_path / "struck").touch()
    codes, _, _ = end_all(processes, tmp_path)
    assert codes == [0, 0, 0]
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 101)) and [change["live"] for change in changes] == [2]
    assert "lost rank 2: host c is taken away (SIGUSR1)" in changes[0]["why"]


@pytest.mark.full
def test_a_run_that_saves_keeps_its_workers(tmp_path):
    """All are on the host, so that the run ends; rank 0 takes longer over it than the host has."""
    file = tmp_path / "notice"
    notice = {"file": str(file), "every_s": 0.1, "deadline_s": 2.5}
    faults = [[0, "step", 8, "dawdle"]]
    process = start(tmp_path, num_steps=100_000, notice=notice, faults=faults, stop_s=60.0)
    wait_for(lambda: (tmp_path / "dawdling-0").exists(), "the step")
    file.touch()
    wait_for(lambda: "saves and ends with exit code 7" in (tmp_path / "metrics.jsonl").read_text(), "the notice")
    time.sleep(1.5)
    assert all(alive(pid_of(tmp_path, rank)) for rank in range(4))
    (tmp_path / "struck").touch()
    assert end(process, tmp_path).code == 7


@pytest.mark.full
def test_nobody_comes_back_to_a_host_that_is_taken_away(tmp_path):
    """One guardian of the host has the notice. The worker of another one is lost before it could leave."""
    faults = [[0, "step", 8, "dawdle"]]
    hosts = ["a", "b", "b", "c"]
    processes = start_on_hosts(tmp_path, hosts, num_steps=400, notice=USR1, max_rejoins=3, faults=faults, zero_stage=0)
    wait_for(lambda: (tmp_path / "dawdling-0").exists(), "the step")
    processes[1].send_signal(signal.SIGUSR1)
    wait_for(lambda: events(tmp_path, "preemption"), "the notice")
    os.kill(pid_of(tmp_path, 2), signal.SIGKILL)
    (tmp_path / "struck").touch()
    codes, outs, _ = end_all(processes, tmp_path)
    assert codes == [0, 0, 0, 0], outs
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 401)) and changes[-1]["live"] == 2
    assert not any(change["joined"] for change in changes)


@pytest.mark.full
@pytest.mark.sample(0, rest=3)
@pytest.mark.parametrize("phase", ["report", "moves", "confirm", "commit"])
@pytest.mark.parametrize("noticed", [0, 3])
def test_a_notice_in_each_phase_of_a_recovery(tmp_path, phase, noticed):
    """Rank 2 is lost; rank 1 holds the change up in a phase, in which the coordinator's host or another one gets its
    notice. Only the step in which rank 2 died is repeated."""
    faults = [[2, "step", 5, "kill"], [1, phase, 1, "dawdle"]]
    hosts = ["a", "b", "c", "d"]
    processes = start_on_hosts(tmp_path, hosts, num_steps=200, notice=USR1, faults=faults, zero_stage=0)
    wait_for(lambda: (tmp_path / "dawdling-1").exists(), "the phase")
    processes[noticed].send_signal(signal.SIGUSR1)
    wait_for(lambda: events(tmp_path, "preemption"), "the notice")
    (tmp_path / "struck").touch()
    codes, _, errs = end_all(processes, tmp_path)
    assert codes == [0, 0, 0, 0] and errs == ["", "", "", ""]
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 201)) and changes[-1]["live"] == 2
    gone = {each["rank"] for change in changes for each in change["who"]}
    assert gone == {2, noticed}
    for rank in {0, 1, 3}:
        begun = computed_steps(tmp_path, rank)
        assert len(begun) - len(set(begun)) <= 1 and set(begun) >= set(range(1, 6))


def test_a_drain_by_command_outlives_its_coordinator(tmp_path):
    """The leader holds the step up after which rank 1 should leave; the coordinator is killed meanwhile."""
    process = start(tmp_path, num_steps=150, faults=[[0, "step", 20, "dawdle"]])
    wait_for(lambda: (tmp_path / "dawdling-0").exists(), "the leader")
    request_drain(tmp_path, parse_drain_target("rank=1"), "")
    found = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(process.pid)], capture_output=True, text=True)
    (coordinator,) = [line.split()[0] for line in found.stdout.splitlines() if "p3d-coord" in line]
    os.kill(int(coordinator), signal.SIGKILL)
    (tmp_path / "struck").touch()
    ended = end(process, tmp_path)
    assert (ended.code, ended.err) == (0, "") and ended.steps == list(range(1, 151))
    assert ended.changes[-1]["live"] == 3 and "rank 1 (pp0 dp1 tp0) has left" in ended.out


@pytest.mark.full
def test_the_coordinator_moves_with_its_host_that_a_command_drains(tmp_path):
    processes = start_on_hosts(tmp_path, ["a", "b", "c"], num_steps=200)
    wait_for_step(tmp_path, 5)
    assert request_drain(tmp_path, parse_drain_target("host=a"), "").endswith("; so does the run's coordinator")
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [0, 0, 0] and errs == ["", "", ""]
    assert_no_step_repeated(tmp_path, 200)
    assert metrics(tmp_path)[1][-1]["live"] == 2 and "rank 0 (pp0 dp0 tp0) has left" in outs[1]


def test_the_coordinator_moves_with_its_host_that_gets_sigterm(tmp_path):
    """As where a pod is evicted, or torchrun ends: SIGTERM to its first process, SIGKILL some time later. One host
    that stays is not half of two, but it has the coordinator by then."""
    processes = start_on_hosts(tmp_path, ["a", "b"], num_steps=300)
    wait_for_step(tmp_path, 5)
    processes[0].send_signal(signal.SIGTERM)
    wait_for(lambda: [change["live"] for change in metrics(tmp_path)[1]][-1:] == [1], "the worker to leave")
    processes[0].kill()
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, 0] and errs == ["", ""]
    assert_no_step_repeated(tmp_path, 300)
    assert "the coordinator moves to b" in outs[0] and "rank 0 (pp0 dp0 tp0) has left" in outs[1]


@pytest.mark.full
def test_the_coordinator_moves_past_a_host_that_got_sigterm(tmp_path):
    """Its guardian is still there, as it is until SIGKILL."""
    processes = start_on_hosts(tmp_path, ["a", "b", "c"], num_steps=300)
    wait_for_step(tmp_path, 5)
    for number in (1, 0):
        processes[number].send_signal(signal.SIGTERM)
        wait_for(lambda live=1 + number: metrics(tmp_path)[1][-1:] and metrics(tmp_path)[1][-1]["live"] == live, "it")
    processes[0].kill()
    processes[1].kill()
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0] and errs == ["", "", ""]
    assert_no_step_repeated(tmp_path, 300)
    assert "the coordinator moves to c" in outs[0]


@pytest.mark.full
def test_a_driver_that_preempts_at_random(tmp_path, seed=2):
    """Six hosts; three of them, perhaps the coordinator's, get notices at random steps and are taken away when their
    workers have left; two seconds later each is replaced by a host that joins. No step is repeated."""
    chance, num_steps = random.Random(seed), 1500
    names = list("abcdef")
    running = dict(zip(names, start_on_hosts(tmp_path, names, num_steps=num_steps, notice=USR1)))
    wait_for_step(tmp_path, 1)
    for number in range(3):
        wait_for_step(tmp_path, len(metrics(tmp_path)[0]) + chance.randrange(5, 40))
        victim = chance.choice(sorted(running))
        process = running.pop(victim)
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: metrics(tmp_path)[1] and metrics(tmp_path)[1][-1]["live"] == 5, f"{victim} to leave")
        process.kill()
        process.communicate()
        name = f"new-{number}"
        time.sleep(2.0)
        running[name] = start(tmp_path, layout=(1, 6, 1), num_steps=num_steps, notice=USR1, joins=True, host=name)
        wait_for(lambda: metrics(tmp_path)[1][-1]["live"] == 6, f"{name} to join")
    codes, _, errs = end_all(list(running.values()), tmp_path)
    assert set(codes) == {0}, errs
    assert_no_step_repeated(tmp_path, num_steps)
    gone = [each["rank"] for change in metrics(tmp_path)[1] for each in change["who"]]
    assert len(gone) == 3 and not any("lost" in change["why"] for change in metrics(tmp_path)[1])
