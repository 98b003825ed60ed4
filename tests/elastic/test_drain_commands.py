"""A person has workers leave by a command: which it means, what is refused, and what happens on real processes."""

from __future__ import annotations

import os
import signal

import pytest

from parallel3d.elastic.drain_target import DrainTarget, choose_workers, parse_drain_target
from parallel3d.elastic.operator_link import request_drain
from parallel3d.errors import LaunchError
from parallel3d.parallel.grid import Grid
from tests.elastic.test_members import end, pid_of, wait_for_step
from tests.elastic.test_takeover import end_all, metrics
from tests.support.member_processes import start, start_on_hosts
from tests.support.processes import alive, wait_for

GRID = Grid.of_replicas([2, 1], tp_size=2)
"""Stage 0: replica 0 = 0 1, replica 1 = 2 3; stage 1: replica 0 = 4 5."""
HOSTS = {0: "a", 1: "a", 2: "b", 3: "b", 4: "a", 5: "a", 9: "b"}
"""9 is a spare."""


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("rank=3", (3,)),
        ("rank=9", (9,)),
        ("replica=0", (0, 1, 4, 5)),
        ("replica=1", (2, 3)),
        ("stage=0,replica=0", (0, 1)),
        ("replica=0,stage=1", (4, 5)),
        ("host=b", (2, 3, 9)),
    ],
)
def test_what_a_command_means(text, ranks):
    target = parse_drain_target(text)
    assert DrainTarget.from_json(target.to_json()) == target and str(target).count("=") == text.count("=")
    choice = choose_workers(target, GRID, HOSTS)
    assert (choice.ranks, choice.refusal) == (ranks, "")


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("rank=6", "rank 6 is not in the run, which has ranks 0, 1, 2, 3, 4, 5 and 9"),
        ("replica=2", "no stage has a replica 2: there are replicas 0 and 1"),
        ("stage=1,replica=1", "stage 1 has no replica 1: there is replica 0"),
        ("stage=2,replica=0", "the run has no stage 2, but stages 0 and 1"),
        ("host=c", "no worker is on host c: the run is on hosts a and b"),
    ],
)
def test_what_is_not_there(text, refusal):
    choice = choose_workers(parse_drain_target(text), GRID, HOSTS)
    assert (choice.ranks, choice.refusal) == ((), refusal)


def test_many_ranks_are_counted():
    hosts = dict.fromkeys(range(10_240), "a")
    assert choose_workers(DrainTarget(rank=10_240), GRID, hosts).refusal.endswith("which has 10,240 ranks")


@pytest.mark.parametrize("text", ["", "3", "rank", "rank=", "rank=x", "rank=-1", "stage=1", "host=", "rank=1,host=a"])
def test_a_command_that_says_nothing(text):
    with pytest.raises(LaunchError, match="use rank=3, replica=1, stage=1,replica=1 or host=NAME"):
        parse_drain_target(text)


def drain(directory, text):
    return request_drain(directory, parse_drain_target(text), "")


@pytest.mark.slow
def test_a_replica_leaves_and_the_rest_is_needed(tmp_path):
    """Its workers end with code 0 and are not started again, though guardians start lost ones."""
    process = start(tmp_path, num_steps=400, max_rejoins=3)
    wait_for_step(tmp_path, 5)
    pids = [pid_of(tmp_path, rank) for rank in (1, 3)]
    answer = drain(tmp_path, "replica=1")
    assert answer.startswith("rank 1 (pp0 dp1 tp0), rank 3 (pp1 dp1 tp0) leave at the next step boundary, after step ")
    with pytest.raises(LaunchError, match="nothing leaves: the run needs rank=2: without, stage 1 has no replica left"):
        drain(tmp_path, "rank=2")
    wait_for(lambda: not any(map(alive, pids)), "the end of the replica")
    with pytest.raises(LaunchError, match="rank 3 is not in the run, which has ranks 0 and 2"):
        drain(tmp_path, "rank=3")
    ended = end(process, tmp_path)
    assert (ended.code, ended.err) == (0, "") and ended.steps == list(range(1, 401))
    assert [change["live"] for change in ended.changes] == [2]
    assert f"replica=1 by command: {answer}" in ended.out
    assert "rank 1 (pp0 dp1 tp0) has left; rank 3 (pp1 dp1 tp0) has left" in ended.out


@pytest.mark.slow
@pytest.mark.full
def test_a_host_leaves_and_nothing_returns_to_it(tmp_path):
    """Its other worker was lost a moment before. A worker of another host comes back as before."""
    hosts = ["a", "a", "b", "b"]
    processes = start_on_hosts(tmp_path, hosts, num_steps=600, max_rejoins=3, faults=[[3, "step", 5, "kill"]])
    wait_for_step(tmp_path, 6)
    assert drain(tmp_path, "host=b").startswith("rank 2 (pp0 dp2 tp0) leaves at the next step boundary, after step ")
    wait_for(lambda: len(metrics(tmp_path)[1]) == 2, "the host to leave")
    os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [0, 0, 0, 0], (outs, errs)
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 601)) and [change["live"] for change in changes] == [3, 2, 1, 2]
    assert [each["rank"] for each in changes[-1]["joined"]] == [4]


@pytest.mark.slow
@pytest.mark.full
def test_a_spare_takes_the_place_of_a_worker_that_leaves(tmp_path):
    process = start(tmp_path, num_steps=400, spares=2)
    wait_for_step(tmp_path, 5)
    assert drain(tmp_path, "rank=5").startswith("rank 5 leaves at")
    wait_for(lambda: not alive(pid_of(tmp_path, 5)), "the spare's end")
    drain(tmp_path, "rank=0")
    ended = end(process, tmp_path)
    assert (ended.code, ended.err) == (0, "") and ended.steps == list(range(1, 401))
    assert ended.changes[-1]["live"] == 4 and [each["rank"] for each in ended.changes[-1]["joined"]] == [4]
    assert "rank 0 (pp0 dp0 tp0) has left" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("command", marks=pytest.mark.full), "SIGTERM"])
def test_a_worker_that_builds_its_part_leaves_without_it(tmp_path, how):
    process = start(tmp_path, num_steps=600, max_rejoins=1, faults=[[3, "step", 5, "kill"], [4, "build", 0, "hang"]])
    wait_for(lambda: (tmp_path / "pid-4").exists(), "the joiner")
    if how == "command":
        drain(tmp_path, "rank=4")
    else:
        os.kill(pid_of(tmp_path, 4), signal.SIGTERM)
    wait_for(lambda: not alive(pid_of(tmp_path, 4)), "the joiner's end")
    ended = end(process, tmp_path)
    assert (ended.code, ended.err) == (0, "") and ended.steps == list(range(1, 601))
    assert [change["live"] for change in ended.changes] == [3]
    assert ended.out.count("rank 4 (new, pp1 tp0) does not join: ended with exit code 0") == (how == "SIGTERM")


@pytest.mark.slow
def test_a_worker_stays_that_a_loss_makes_indispensable(tmp_path):
    """The other replica dies before the step at whose end the worker should leave."""
    faults = [[0, "step", 50, "dawdle"]]
    process = start(tmp_path, layout=[1, 2, 1], num_steps=100, faults=faults)
    wait_for(lambda: (tmp_path / "dawdling-0").exists(), "the leader")
    drain(tmp_path, "rank=1")
    os.kill(pid_of(tmp_path, 0), signal.SIGKILL)
    ended = end(process, tmp_path)
    assert (ended.code, ended.err) == (0, "") and ended.steps == list(range(1, 101))
    assert [change["live"] for change in ended.changes] == [1]
    assert "rank 1 (pp0 dp1 tp0) stays after all: without it, stage 0 has no replica left" in ended.out
