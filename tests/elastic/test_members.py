"""Changes of membership with real processes: who is lost when, how many generations it takes, what it says, who is
left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.member_processes import BYTES_MOVED, start
from tests.support.processes import alive, pids, read_to_the_end, wait_for

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Ended:
    """The results of a world: logs, records, exit codes."""

    code: int
    out: str
    err: str
    steps: list[int]
    changes: list[dict[str, Any]]
    logs: dict[int, str]


def end(process: subprocess.Popen[str], directory: Path) -> Ended:
    """Waits for a world to end; no process of it may be left."""
    out, err = read_to_the_end(process)
    wait_for(lambda: not any(alive(pid) for pid in pids(directory)), "the last process to be gone")
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()]
    return Ended(
        code=process.returncode,
        out=out,
        err=err,
        steps=[line["step"] for line in lines if "event" not in line],
        changes=[line for line in lines if line.get("event") == "membership"],
        logs={int(log.stem.split("-")[1]): log.read_text() for log in (directory / "logs").iterdir()},
    )


def run(directory: Path, **spec: Any) -> Ended:
    return end(start(directory, **spec), directory)


def assert_went_on(ended: Ended, *, num_changes: int, num_steps: int = 20) -> None:
    assert (ended.code, ended.err) == (0, ""), ended
    assert ended.steps == list(range(1, num_steps + 1))
    assert len(ended.changes) == num_changes, ended.changes
    committed = max((change["generation"] for change in ended.changes), default=0)
    last = [re.findall("^generation (\\d+): ", log, re.M)[-1] for log in ended.logs.values() if log.endswith("done\n")]
    assert last and set(last) == {str(committed)}


def wait_for_step(directory: Path, number: int) -> None:
    metrics = directory / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and f'"step": {number}' in metrics.read_text(), f"step {number}")


def pid_of(directory: Path, rank: int) -> int:
    """Waits for a worker's process, which a spare may start after the others' first steps."""
    file = directory / f"pid-{rank}"
    wait_for(lambda: file.exists() and file.read_text().split(), f"rank {rank}")
    return int(file.read_text().split()[0])


def test_nobody_is_lost(tmp_path):
    assert_went_on(run(tmp_path), num_changes=0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_worker_is_done_without(tmp_path, rank):
    ended = run(tmp_path, faults=[[rank, "step", 5, "kill"]])
    assert_went_on(ended, num_changes=1)
    (change,) = ended.changes
    at = f"pp{rank // 2} dp{rank % 2} tp0"
    assert (change["generation"], change["step"], change["moved_bytes"]) == (1, 5, 3 * BYTES_MOVED)
    assert (change["live"], change["spare"], change["lost"]) == (3, 0, 1)
    assert change["who"] == [{"rank": rank, "coordinates": at}]
    assert change["why"] == f"lost rank {rank}: killed by SIGKILL in step 5" and change["plan"] == "as planned"
    figures = [change[name] for name in ("detect_s", "agree_s", "repair_s", "regroup_s", "first_step_s")]
    assert all(seconds > 0 for seconds in figures)
    line = rf"generation 1: lost rank {rank} \({at}\): killed by SIGKILL in step 5; 3 live, 0 spare, 1 lost; "
    parts = r"back in [\d.]+ s \(noticed [\d.]+, agreed [\d.]+, repaired [\d.]+, regrouped [\d.]+\), 1.5 MiB"
    assert re.search(line + parts, ended.out)


def test_peers_of_a_lost_worker_in_its_tensor_parallel_group_become_spares(tmp_path):
    ended = run(tmp_path, layout=[1, 2, 2], faults=[[3, "step", 4, "kill"]])
    assert_went_on(ended, num_changes=1)
    assert (ended.changes[0]["live"], ended.changes[0]["spare"], ended.changes[0]["lost"]) == (2, 1, 1)
    assert "generation 1: [0, 1] from step 3" in ended.logs[2] and "done" not in ended.logs[2]


@pytest.mark.full
def test_two_losses_at_once_are_one_change(tmp_path):
    process = start(tmp_path, num_steps=60)
    wait_for_step(tmp_path, 3)
    for rank in (1, 2):  # replica 1 of stage 0, replica 0 of stage 1
        os.kill(pid_of(tmp_path, rank), signal.SIGSTOP)  # so that neither gets on while the other is killed
    for rank in (1, 2):
        os.kill(pid_of(tmp_path, rank), signal.SIGKILL)
    ended = end(process, tmp_path)
    assert_went_on(ended, num_changes=1, num_steps=60)
    assert [gone["rank"] for gone in ended.changes[0]["who"]] == [1, 2] and ended.changes[0]["live"] == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("point", ["report", "moves", "confirm"])
def test_a_loss_during_recovery_begins_it_again(tmp_path, point):
    ended = run(tmp_path, faults=[[3, "step", 5, "kill"], [0, point, 1, "kill"]])
    assert_went_on(ended, num_changes=1)
    assert ended.changes[0]["generation"] == 2 and [gone["rank"] for gone in ended.changes[0]["who"]] == [0, 3]
    assert ended.changes[0]["step"] == 5 and ended.changes[0]["moved_bytes"] == 2 * BYTES_MOVED


@pytest.mark.full
def test_a_loss_right_after_the_commit_is_a_change_of_its_own(tmp_path):
    ended = run(tmp_path, faults=[[3, "step", 5, "kill"], [0, "commit", 1, "kill"]])
    assert_went_on(ended, num_changes=2)
    assert [[gone["rank"] for gone in change["who"]] for change in ended.changes] == [[3], [0]]
    assert ended.changes[0]["regroup_s"] is None  # its leader was lost before it trained


@pytest.mark.full
def test_a_loss_after_the_last_step_is_waited_out(tmp_path):
    ended = run(tmp_path, faults=[[0, "finish", 0, "kill"]])
    assert_went_on(ended, num_changes=1)
    assert ended.changes[0]["first_step_s"] is None  # no step followed


def test_a_stopped_worker_is_killed_and_done_without(tmp_path):
    ended = run(tmp_path, faults=[[1, "step", 5, "stop"]])
    assert_went_on(ended, num_changes=1)
    assert re.search(r"lost rank 1: silent for \d+\.\d s \(stopped\) in step 5", ended.changes[0]["why"])
    assert ended.changes[0]["detect_s"] >= 0.3


def test_a_worker_that_does_not_get_on_is_killed(tmp_path):
    ended = run(tmp_path, faults=[[1, "step", 5, "hang"]])
    assert_went_on(ended, num_changes=1)
    assert re.search(r"lost rank 1: stuck for 2 s at instruction \d+ in step 5", ended.changes[0]["why"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("point", ["report", "confirm"])
def test_a_worker_that_does_not_answer_to_a_change_is_evicted(tmp_path, point):
    """Neither its guardian's watchdog nor the probes find it."""
    faults = [[3, "step", 5, "kill"], [0, point, 1, "hang"]]
    ended = run(tmp_path, faults=faults, watchdog_s=60.0, change_s=1.0)
    assert_went_on(ended, num_changes=1)
    assert [gone["rank"] for gone in ended.changes[0]["who"]] == [0, 3]
    assert "lost rank 0: no answer to the change to generation 1 within 1 s in step 5" in ended.changes[0]["why"]


def test_a_suspicion_is_a_change_with_the_same_members(tmp_path):
    ended = run(tmp_path, faults=[[2, "step", 5, "suspect"]])
    assert_went_on(ended, num_changes=1)
    assert ended.changes[0]["why"] == "rank 2: something only I have seen" and ended.changes[0]["who"] == []
    assert (ended.changes[0]["live"], ended.changes[0]["lost"]) == (4, 0)


def test_a_worker_that_is_to_leave_hands_over_and_goes(tmp_path):
    ended = run(tmp_path, faults=[[2, "step", 5, "term"]], num_steps=100)
    assert_went_on(ended, num_changes=1, num_steps=100)
    assert "rank 2 (pp1 dp0 tp0) has left; 3 live, 0 spare, 1 lost" in ended.out
    assert ended.changes[0]["who"] == [{"rank": 2, "coordinates": "pp1 dp0 tp0"}]
    assert ended.changes[0]["detect_s"] is None and "done" not in ended.logs[2]


@pytest.mark.full
def test_a_worker_that_can_not_be_spared_stops_the_run_instead(tmp_path):
    process = start(tmp_path, layout=[2, 1, 1], num_steps=100_000)
    wait_for_step(tmp_path, 3)
    os.kill(pid_of(tmp_path, 1), signal.SIGTERM)
    ended = end(process, tmp_path)
    assert ended.code == 143 and re.fullmatch(r"stopped after step \d+\n", ended.err) and not ended.changes
    assert "rank 1 (pp1 dp0 tp0) should drain, but the run can't go on without it" in ended.out
    assert ended.out.count("stopping after this step; press Ctrl-C again to stop at once") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("number, expected", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_of_all_is_a_stop_of_the_run(tmp_path, number, expected):
    process = start(tmp_path, num_steps=100_000)
    wait_for_step(tmp_path, 3)
    os.killpg(process.pid, number)
    ended = end(process, tmp_path)
    assert ended.code == expected and re.fullmatch(r"stopped after step \d+\n", ended.err) and not ended.changes
    assert all(log.endswith("done\n") for log in ended.logs.values())


def test_a_stage_without_replica_halts_the_run_and_says_whom_it_has_lost(tmp_path):
    ended = run(tmp_path, faults=[[2, "step", 4, "kill"], [3, "step", 8, "kill"]])
    assert ended.code == 3 and len(ended.changes) == 1 and ended.steps == list(range(1, 8))
    lines = ended.err.splitlines()
    assert lines[0].startswith("the run can't go on: ") and "stage 1" in lines[0]
    for rank, step in ((2, 4), (3, 8)):
        assert f"rank {rank} (pp1 dp{rank - 2} tp0) was killed by SIGKILL in step {step}" in lines
        assert f"  log: {tmp_path / 'logs' / f'rank-{rank}.log'}" in lines
    last_words = ended.logs[0] + ended.logs[1]
    assert "ends: the run can't go on: " in last_words and "Traceback" not in last_words


def test_a_range_without_holder_halts_the_run(tmp_path):
    ended = run(tmp_path, zero_backups=0, faults=[[2, "step", 4, "kill"]])
    assert ended.code == 3 and not ended.changes and "zero_backups" in ended.err


@pytest.mark.full
def test_everybody_killed_is_no_success(tmp_path):
    ended = run(tmp_path, faults=[[rank, "step", 5, "kill"] for rank in range(4)])
    assert ended.code == 3 and not ended.changes and "the run can't go on" in ended.err


@pytest.mark.full
def test_everybody_killed_after_the_last_step_is_no_success(tmp_path):
    ended = run(tmp_path, faults=[[rank, "finish", 0, "kill"] for rank in range(4)])
    assert ended.code == 3 and not ended.changes


def test_a_worker_that_ends_early_without_a_fault_is_a_failure(tmp_path):
    ended = run(tmp_path, faults=[[1, "step", 5, "exit"]])
    assert ended.code == 3 and not ended.changes
    assert ended.err.startswith("rank 1 (pp0 dp1 tp0) ended with exit code 0 in step 5, before the run was over\n")


def test_nobody_outlives_a_killed_launcher(tmp_path):
    process = start(tmp_path, num_steps=100_000)
    wait_for_step(tmp_path, 3)
    process.kill()
    assert end(process, tmp_path).code == -signal.SIGKILL
