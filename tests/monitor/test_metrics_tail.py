"""MetricsTail: each line once, whatever the writer does to its file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from parallel3d.monitor.metrics_tail import MetricsTail
from parallel3d.monitor.run_folder import METRICS, RunFolder


def step(number: int) -> dict[str, Any]:
    return {"step": number, "loss": 1.0 / number}


def started(time: float) -> dict[str, Any]:
    return {"event": "started", "step": 0, "time": time}


def append(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_a_line_comes_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    tail = MetricsTail(path, since_s=10)
    assert tail.new_lines() == []
    append(path, started(10), step(1))
    assert tail.new_lines() == [started(10), step(1)]
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert tail.new_lines() == []
    with path.open("a") as file:
        file.write('ss": 0.5}\n')
    assert tail.new_lines() == [step(2)]
    assert tail.new_lines() == []


def test_an_earlier_run_and_a_history_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    append(path, started(3), step(1), step(2))
    tail = MetricsTail(path, since_s=10)
    assert tail.new_lines() == []  # the earlier run's file, which is still there
    os.rename(path, tmp_path / "previous")
    append(path, started(3), step(1), step(2), started(11), step(3))
    assert tail.new_lines() == [started(11), step(3)]


def test_steps_that_a_restart_has_lost_come_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, config="{}", environment={})
    tail = MetricsTail(tmp_path / METRICS, since_s=10)
    evaluation, restart = {"event": "evaluation", "step": 3, "loss": 2.0}, {"event": "restart", "step": 2}
    for line in (started(10), {"event": "notice", "text": "a"}, step(1), step(2), step(3), evaluation):
        folder.append_metrics(line)
    assert len(tail.new_lines()) == 6
    failure = {"event": "failure", "text": "b"}
    folder.append_metrics(failure)  # between two looks
    folder.rewind(2)
    for line in (restart, step(3), evaluation, step(4)):
        folder.append_metrics(line)
    assert tail.new_lines() == [failure, restart, step(3), evaluation, step(4)]
    folder.close()


def test_half_a_line_that_a_new_coordinator_drops(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    append(path, started(10), step(1))
    size = path.stat().st_size
    tail = MetricsTail(path, since_s=10)
    with path.open("a") as file:
        file.write('{"step": 2, "loss": 0.123')
    assert len(tail.new_lines()) == 2
    os.truncate(path, size)
    append(path, step(2))
    assert tail.new_lines() == [step(2)]
