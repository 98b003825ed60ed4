"""Users' scripts on hosts that are taken away with a notice, on real processes; and mistakes about notices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parallel3d.elastic.drop_in.launch_script import read_host, read_notice
from parallel3d.errors import ConfigError
from tests.drop_in.test_scripts import ROOT, SCRIPT, assert_same_weights, read_script, run_script, start_script
from tests.support.member_processes import free_port
from tests.support.processes import read_to_the_end, wait_for

HOSTS = ["a", "b", "c"]


def num_lines(directory: Path, what: str) -> int:
    path = directory / "metrics.jsonl"
    return path.read_text().count(what) if path.exists() else 0


def start_on_hosts(directory: Path, **spec: Any) -> list[subprocess.Popen[str]]:
    """A script as a launcher without a store of its own starts it: a process on each of the hosts."""
    place = {"WORLD_SIZE": len(HOSTS), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    variables = {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(directory), json.dumps({"num_workers": 1, "hosts": HOSTS, **spec})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables, "RANK": str(rank), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        for rank in range(len(HOSTS))
    ]


@pytest.mark.slow
def test_a_host_with_a_notice_leaves_a_script_without_a_repeated_step(tmp_path: Path) -> None:
    """The coordinator's: it moves away, too. No weight differs by a bit."""
    alone = run_script(tmp_path / "alone", epochs=8)
    folder = tmp_path / "hosts"
    processes = start_on_hosts(folder, epochs=8, slot_s=0.05, notice={"signal": "USR1"}, coordinator_host="b")
    wait_for(lambda: num_lines(folder, "goes on with its coordinator on b"), "the move")
    processes[1].send_signal(signal.SIGUSR1)
    others = [read_to_the_end(processes[rank]) for rank in (1, 2)]
    ended = read_script(folder, processes[0])
    assert [process.returncode for process in processes] == [0, 0, 0], (ended, others)
    assert set(ended.weights) == {0, 2}
    assert_same_weights(ended, alone.weights[0])
    assert ended.losses == alone.losses
    assert [line["step"] for line in ended.lines if "event" not in line] == list(range(1, 17))
    (notice,) = [line for line in ended.lines if line.get("event") == "preemption"]
    assert (notice["host"], notice["ranks"]) == ("b", [1])
    assert not any("lost" in change["why"] for change in ended.changes) and ended.changes[-1]["live"] == 2
    notices = [line["text"] for line in ended.lines if line.get("event") == "notice"]
    moves = [text for text in notices if text.startswith("the coordinator moves")]
    assert moves[0] == "the coordinator moves to b" and len(moves) == 2 and moves[1] != moves[0]


@pytest.mark.slow
@pytest.mark.full
def test_a_script_whose_only_host_has_a_notice_ends_its_loop_and_saves(tmp_path: Path) -> None:
    """With the exit code for a requeue, once the script is at its end."""
    file, folder = tmp_path / "notice", tmp_path / "run"
    spec = dict(num_workers=2, epochs=100_000, slot_s=0.05, notice={"file": str(file), "every_s": 0.1})
    process = start_script(folder, spec)
    wait_for(lambda: num_lines(folder, '"loss"') >= 3, "three steps")
    file.touch()
    ended = read_script(folder, process)
    assert ended.code == 7, ended
    assert f"is taken away ({file} exists)" in ended.err
    assert set(ended.weights) == {0, 1} and ended.weights[0]["0.weight"].equal(ended.weights[1]["0.weight"])
    steps = [line["step"] for line in ended.lines if "event" not in line]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) < 1000


MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"signal": "TERM"}, "notice.signal = 'TERM'", "USR1"),
    ({"sginal": "USR1"}, "notice.sginal = 'USR1'", "Did you mean"),
    ({"file": "x", "every_s": 0}, "notice.every_s = 0", "greater than or equal to 0.1"),
    ({"url": "http://x"}, "notice.url = 'http://x'", "Set notice.cloud"),
]


@pytest.mark.parametrize("fields, where, rule", MISTAKES)
def test_a_mistake_in_a_notice(fields: dict[str, Any], where: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_notice(fields)
    assert where in str(caught.value) and rule in str(caught.value)


@pytest.mark.parametrize("name", ["", 3])
def test_a_coordinator_host_that_is_no_name(name: object) -> None:
    with pytest.raises(ConfigError, match="coordinator_host = .*must be the name of a host"):
        read_host(name)
    assert read_host("node-1") == "node-1" and read_host(None) is None
