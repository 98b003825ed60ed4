"""`parallel3d study layout`: real runs of two layouts, stopped in between, and the table of what they took."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from parallel3d.child_process import command_line
from parallel3d.commands.main import run
from tests.support.processes import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.full]
COMMAND = [
    "layout",
    "--config",
    "tiny.json",
    "--devices",
    "2xH100-80GB",
    "--top",
    "2",
    "--steps",
    "5",
    "--out",
    "study",
]


def saved_runs(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in folder.glob("tp*.json")}


def stop_after_its_first_run(folder: Path) -> str:
    """Starts the study as a user does and presses Ctrl-C; returns the name of the finished run."""
    unless_ignored = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # as it is in a shell's background
    process = subprocess.Popen(command_line("study", *COMMAND), start_new_session=True, preexec_fn=unless_ignored)
    try:
        wait_for(lambda: saved_runs(folder), "the first run")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=300) == 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=300)
    [name] = saved_runs(folder)
    assert not (folder / "result.json").exists()
    return name


def step_time(folder: Path) -> float:
    """Median seconds of the steps that a run's own file has, without the first."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step_s"] for line in lines if "event" not in line]
    assert len(steps) == 5
    return median(steps[1:])


def fastest_said(out: str) -> str:
    [line] = [line for line in out.splitlines() if line.startswith("fastest measured: ")]
    return line.removeprefix("fastest measured: ").rpartition(" (")[0]


def test_the_fastest_layout_is_the_fastest_of_the_runs(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "study"
    first = stop_after_its_first_run(folder)
    kept = saved_runs(folder)[first].read_text()
    assert run("study", COMMAND) == 0
    shown = capsys.readouterr()
    assert f"run 1 of at most 2: {first}: " in shown.err and shown.err.count("(from an earlier call)") == 1
    assert saved_runs(folder)[first].read_text() == kept

    result = json.loads((folder / "result.json").read_text())
    rows = [line.split() for line in shown.out.splitlines()[2:4]]
    labels = [line[line.index(" tp") + 1 :] for line in shown.out.splitlines()[2:4]]
    assert len(result["layouts"]) == len(saved_runs(folder)) == 2
    predicted = [each["predicted_step_s"] for each in result["layouts"]]
    assert predicted == sorted(predicted)
    times = []
    for row, each in zip(rows, result["layouts"]):
        name, layout = each["run"]["name"], each["layout"]
        config = json.loads((folder / name / "config.json").read_text())
        sizes = [config["parallel"][f"{axis}_size"] for axis in ("tp", "pp", "dp")]
        assert sizes == [layout["tp"], layout["pp"], layout["dp"]] and config["run"]["num_steps"] == 5
        times.append(step_time(folder / name))
        assert each["run"]["step_s"] == times[-1] and each["run"]["num_steps"] == 5
        wanted = [each["predicted_step_s"], each["predicted_step_s"] / predicted[0], times[-1], times[-1] / times[0]]
        assert [float(cell) for cell in row[1:5]] == pytest.approx(wanted, rel=0.01, abs=6e-3)
    assert fastest_said(shown.out) == labels[times.index(min(times))]

    assert run("study", COMMAND) == 0
    again = capsys.readouterr()
    assert again.err.count("(from an earlier call)") == 2 and again.out == shown.out

    names = [each["run"]["name"] for each in result["layouts"]]
    for seconds, ended, fastest in (
        ((0.5, 0.25), ("", ""), 1),
        ((0.25, 0.5), ("", ""), 0),
        ((0.25, 0.5), ("no memory", ""), 1),
    ):
        for name, step_s, why in zip(names, seconds, ended):
            saved = json.loads(saved_runs(folder)[name].read_text())
            saved["run"] |= {"step_s": step_s, "ended": why}
            saved_runs(folder)[name].write_text(json.dumps(saved))
        assert run("study", COMMAND) == 0
        assert fastest_said(capsys.readouterr().out) == labels[fastest]
