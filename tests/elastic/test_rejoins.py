"""Guardians start workers in the place of lost ones; they enter between two steps, and cost the run no step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from parallel3d.elastic.guardian.rejoin_schedule import BACKOFF_COUNTED_S, BACKOFF_S, COUNTED_S, RejoinSchedule
from tests.elastic.test_members import Ended, end, pid_of, run, wait_for_step
from tests.elastic.test_takeover import end_all, metrics
from tests.support.member_processes import start, start_on_hosts
from tests.support.processes import alive, wait_for


def test_a_slot_is_offered_ever_later_and_then_not_again():
    schedule = RejoinSchedule(3, 300.0)
    last_s = 110.0 + BACKOFF_COUNTED_S
    for loss_s, wait_s in ((100.0, BACKOFF_S), (110.0, 4 * BACKOFF_S), (last_s, BACKOFF_S)):
        schedule.on_lost(1, loss_s)
        assert schedule.take_due(loss_s + 0.9 * wait_s) == [] != schedule.take_due(loss_s + wait_s)
        assert schedule.offered == [1] and schedule.take(1) and not schedule.take(1) and schedule.offered == []
    schedule.on_lost(1, last_s + 100.0)
    assert schedule.take_due(1e6) == []
    schedule.on_lost(1, last_s + 100.0 + COUNTED_S)  # the first ones count no longer
    assert schedule.take_due(1e6) == [1]


def test_the_place_of_a_slow_worker_stays_empty_for_a_probation():
    """Twice as long if the next worker is slow again within an hour. Each counts as a loss; other slots don't wait."""
    schedule = RejoinSchedule(3, 300.0)
    left_s = 100.0
    for wait_s in (300.0, 600.0, 1200.0):
        schedule.on_left_slow(1, left_s)
        assert schedule.take_due(left_s + 0.99 * wait_s) == [] and schedule.is_pending
        assert schedule.take_due(left_s + wait_s) == [1] and schedule.take(1)
        left_s += wait_s + 60.0
    schedule.on_left_slow(1, left_s)
    schedule.on_lost(0, left_s)
    assert schedule.take_due(1e6) == [0]  # too many within an hour
    schedule.on_left_slow(1, 1e6)
    assert schedule.take_due(1e6 + 299.0) == [] != schedule.take_due(1e6 + 300.0)


def test_a_death_does_not_lengthen_the_probation():
    schedule = RejoinSchedule(9, 300.0)
    schedule.on_lost(1, 0.0)
    assert schedule.take_due(BACKOFF_S) == [1] and schedule.take(1)
    schedule.on_left_slow(1, 100.0)
    assert schedule.take_due(399.0) == [] != schedule.take_due(400.0)
    schedule.on_lost(1, 500.0)
    assert schedule.take_due(500.0 + BACKOFF_S) == [1]


def test_nothing_is_offered_after_the_end():
    schedule = RejoinSchedule(2, 300.0)
    schedule.on_lost(0, 0.0)
    schedule.on_lost(1, 100.0)
    assert schedule.take_due(50.0) == [0]
    schedule.end()
    schedule.on_lost(0, 200.0)
    assert schedule.offered == schedule.take_due(1e6) == [] and not schedule.take(0)


def held_by(directory: Path, rank: int) -> int:
    """The sockets and selectors that a worker holds."""
    folder = Path("/proc", (directory / f"pid-{rank}").read_text().split()[0], "fd")
    links = [os.readlink(each) for each in folder.iterdir()]
    return sum(link.startswith(("socket:", "anon_inode:[eventpoll]")) for link in links)


def assert_came_back(ended: Ended, *joined: list[int], num_steps: int) -> None:
    """All steps were made once, and at the end all places are taken."""
    assert (ended.code, ended.err) == (0, ""), ended
    assert ended.steps == list(range(1, num_steps + 1))
    assert_joined(ended.changes, *joined)


def assert_joined(changes: list[dict[str, Any]], *joined: list[int]) -> None:
    """The ranks that got a place in each change that gave some; the last one made the run whole."""
    found = [[each["rank"] for each in change["joined"]] for change in changes]
    assert [ranks for ranks in found if ranks] == list(joined), changes
    assert (changes[-1]["live"], changes[-1]["lost"]) == (4, 0)


@pytest.mark.slow
def test_a_lost_worker_comes_back_and_again(tmp_path):
    faults = [[3, "step", 5, "kill"], [4, "step", 200, "kill"]]
    ended = run(tmp_path, faults=faults, num_steps=500, max_rejoins=2)
    assert_came_back(ended, [4], [5], num_steps=500)
    assert [change["live"] for change in ended.changes] == [3, 4, 3, 4]
    assert "rank 4 (pp1 dp1 tp0) joins; 4 live, 0 spare, 0 lost" in ended.out
    assert "lost rank 4 (pp1 dp1 tp0): killed by SIGKILL in step 200" in ended.out


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(("wait_s", "joined"), [(100.0, [[4, 5]]), (0.5, [[4], [5]])])
def test_those_that_come_back_wait_for_each_other(tmp_path, wait_s, joined):
    """Ranks 1 and 3 die; the second to come back builds its part for two seconds."""
    faults = [[1, "step", 5, "kill"], [3, "step", 5, "kill"], [5, "build", 0, "dawdle"]]
    settings = dict(max_rejoins=1, join_threshold=2, join_wait_s=wait_s)
    process = start(tmp_path, faults=faults, num_steps=100_000, **settings)
    wait_for(lambda: (tmp_path / "dawdling-5").exists(), "the second to come back")
    waited_for = (lambda: joined_ranks(tmp_path)) if len(joined) > 1 else (lambda: (tmp_path / "pid-4").exists())
    wait_for(waited_for, "the first to come back")
    step = len(metrics(tmp_path)[0])
    wait_for_step(tmp_path, step + 50)
    assert joined_ranks(tmp_path) == joined[:-1]
    (tmp_path / "struck").touch()
    wait_for(lambda: joined_ranks(tmp_path) == joined, "the other one to join")
    process.send_signal(signal.SIGINT)
    ended = end(process, tmp_path)
    assert ended.err.startswith("stopped after step ") and ended.steps == list(range(1, len(ended.steps) + 1))
    assert (ended.changes[-1]["live"], ended.changes[-1]["lost"]) == (4, 0)


def joined_ranks(directory: Path) -> list[list[int]]:
    """The ranks that each change has given places."""
    found = [[each["rank"] for each in change["joined"]] for change in metrics(directory)[1]]
    return [ranks for ranks in found if ranks]


@pytest.mark.slow
@pytest.mark.full
def test_joiners_that_die_before_they_enter_cost_nothing(tmp_path):
    """One while it builds its part, one that fails there. In threads others die in the change itself."""
    faults = [[3, "step", 5, "kill"], [4, "build", 0, "kill"], [5, "build", 0, "fail"]]
    ended = run(tmp_path, faults=faults, num_steps=900, max_rejoins=5)
    assert_came_back(ended, [6], num_steps=900)
    assert "rank 4 (new, pp1 tp0) does not join: killed by SIGKILL" in ended.out
    assert "rank 5 (new, pp1 tp0) fails: ValueError: injected" in ended.out
    assert "rank 5 (new, pp1 tp0) does not join: ended with exit code 1" in ended.out


@pytest.mark.slow
@pytest.mark.full
def test_a_joiner_that_is_late_does_not_keep_the_run(tmp_path):
    faults = [[3, "step", 5, "kill"], [4, "build", 0, "hang"]]
    ended = run(tmp_path, faults=faults, num_steps=300, max_rejoins=1, start_s=300.0)
    assert 4 in ended.logs and (ended.code, ended.err) == (0, "") and ended.steps == list(range(1, 301))
    assert [change["live"] for change in ended.changes] == [3]


@pytest.mark.slow
@pytest.mark.full
def test_another_one_comes_for_a_joiner_that_is_late(tmp_path):
    """It builds for a minute, and is killed after the time that the run's start may take."""
    faults = [[3, "step", 5, "kill"], [4, "build", 0, "hang"]]
    process = start(tmp_path, faults=faults, num_steps=100_000, max_rejoins=2, start_s=10.0)
    late = pid_of(tmp_path, 4)
    wait_for(lambda: joined_ranks(tmp_path), "the one that comes instead")
    assert joined_ranks(tmp_path) == [[5]] and not alive(late)
    process.send_signal(signal.SIGINT)
    ended = end(process, tmp_path)
    assert ended.err.startswith("stopped after step ") and ended.steps == list(range(1, len(ended.steps) + 1))
    assert [change["live"] for change in ended.changes] == [3, 4]
    assert "rank 4 (new, pp1 tp0) does not join: not ready to join within 10 s" in ended.out


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("point", ["build", "report", "confirm"])
def test_the_coordinator_is_lost_while_a_worker_joins(tmp_path, point):
    """4 takes the place of 3. Its coordinator is lost before it is ready, or in the change with which it enters."""
    faults = [[3, "step", 5, "kill"], [4, point, 0 if point == "build" else 2, "dawdle"]]
    processes = start_on_hosts(tmp_path, ["a", "b", "c", "d"], num_steps=600, faults=faults, max_rejoins=1)
    wait_for(lambda: (tmp_path / "dawdling-4").exists(), "the joiner")
    assert held_by(tmp_path, 4) <= held_by(tmp_path, 1)  # a worker that holds its guardian's sockets keeps them open
    processes[0].kill()
    (tmp_path / "struck").touch()
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [-signal.SIGKILL, 0, 0, 0], (outs, errs)
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 601)) and (changes[-1]["live"], changes[-1]["lost"]) == (3, 1)
    assert [each["rank"] for change in changes for each in change["joined"]] == [4], changes


@pytest.mark.slow
@pytest.mark.full
def test_the_host_of_a_lost_guardian_comes_back(tmp_path):
    processes = start_on_hosts(tmp_path, ["a", "b", "c", "d"], num_steps=500, max_rejoins=1)
    wait_for_step(tmp_path, 5)
    os.kill(int((tmp_path / "pid-2").read_text().split()[1]), signal.SIGKILL)
    codes, outs, errs = end_all(processes, tmp_path)
    assert codes == [0, 0, 0, 0], (outs, errs)
    steps, changes = metrics(tmp_path)
    assert steps == list(range(1, 501))
    assert_joined(changes, [4])
