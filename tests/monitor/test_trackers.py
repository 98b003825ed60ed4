"""Trackers: each process sends every figure once, goes on in its run after a resume, and harms no training."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from parallel3d.__main__ import main
from parallel3d.commands import track
from parallel3d.errors import ConfigError, UserError
from parallel3d.monitor.run_folder import SUMMARY, RunFolder
from parallel3d.monitor.tracker_ids import read_run_id, write_run_id
from parallel3d.monitor.tracker_processes import TrackerProcesses, check_tracker
from parallel3d.monitor.trackers import find_tracker
from tests.monitor.test_tensorboard import read as read_events
from tests.support.wandb_file import history_of, read_records, record_of

ROOT = Path(__file__).parents[2]
NOTES = """
import json, time
class Notes:
    def __init__(self, run):
        self.run_id = run.run_id or f"id-of-{run.name}"
        self.file = open(run.folder / "notes.jsonl", "a")
        self.note("init", run.run_id, run.project, run.config["model"])
    def note(self, *words):
        print(json.dumps(words), file=self.file, flush=True)
    def log(self, step, values):
        self.note("log", step, values)
    def finish(self, exit_code, summary):
        self.note("finish", exit_code)
class Broken(Notes):
    def log(self, step, values):
        raise OSError("the server is gone\\nfor good")
class Stuck(Notes):
    def log(self, step, values):
        time.sleep(1000)
"""
EVALUATION = {"event": "evaluation", "step": 2, "loss": 3.0, "seconds": 1.0, "time": 5.0}


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(NOTES)
    return str(tmp_path / "mine.py")


def write_run(path: Path, *, first: int = 0, last: int = 2, is_over: bool = True) -> RunFolder:
    """A run folder with steps `first` + 1 to `last` of this start, and one evaluation."""
    folder = RunFolder(path, config='{"model": {"hidden_size": 4}}', environment={}, history_until_step=first)
    folder.append_metrics({"event": "started", "step": first, "time": round(time.time(), 3)})
    for step in range(first + 1, last + 1):
        folder.append_metrics({"step": step, "loss": 4.0 - step, "lr": 0.5})
    folder.append_metrics(EVALUATION)
    if is_over:
        end_run(folder)
    return folder


def end_run(folder: RunFolder) -> None:
    folder.write_summary({"exit_code": 0, "last_step": 2})
    folder.close()


def notes(path: Path) -> list[Any]:
    return [json.loads(line) for line in (path / "notes.jsonl").read_text().rpartition("\n")[0].splitlines()]


def follow(path: Path, tracker: str, *, end_wait_s: float = 100.0) -> TrackerProcesses:
    return TrackerProcesses([tracker], path, project="p", name="n", end_wait_s=end_wait_s)


@pytest.mark.slow
def test_a_run_is_followed_and_resumed(tmp_path: Path, mine: str) -> None:
    path, tracker = tmp_path / "run", f"{mine}:Notes"
    with follow(path, tracker):
        folder = write_run(path, is_over=False)
        deadline = time.monotonic() + 300
        while not (path / "notes.jsonl").exists() or len(notes(path)) < 4:  # before the run has ended
            assert time.monotonic() < deadline
            time.sleep(0.05)
        end_run(folder)
    started = ["init", None, "p", {"hidden_size": 4}]
    steps = [["log", step, {"train/loss": 4.0 - step, "train/lr": 0.5}] for step in (1, 2, 3)]
    evaluated = ["log", 2, {"evaluation/loss": 3.0, "evaluation/seconds": 1.0}]
    assert notes(path) == [started, *steps[:2], evaluated, ["finish", 0]]

    with follow(path, tracker):  # the history is there already, the new lines are sent
        write_run(path, first=2, last=3)
    resumed = ["init", "id-of-n", "p", {"hidden_size": 4}]
    assert notes(path)[5:] == [resumed, steps[2], evaluated, ["finish", 0]]

    with follow(path, tracker):  # another run in the same folder
        write_run(path)
    assert notes(path)[9] == started


@pytest.mark.slow
def test_tensorboard_has_whole_curves_after_a_resume(tmp_path: Path) -> None:
    """The files of the start before are moved away. Of a finished run each line is written once, too."""
    pytest.importorskip("tensorboardX")
    path, steps = tmp_path / "run", [0, 1, 2, 2, 3, 2]  # 0: the file's version; an evaluation follows 2 and 3
    with follow(path, "tensorboard"):
        write_run(path)
    with follow(path, "tensorboard"):
        write_run(path, first=2, last=3)
    (file,) = (path / "tensorboard").iterdir()
    assert [step for step, _ in read_events(file)] == steps
    shutil.rmtree(path / "tensorboard")
    assert track.main([str(path), "--to", "tensorboard"]) == 0
    (file,) = (path / "tensorboard").iterdir()
    assert [step for step, _ in read_events(file)] == steps[:-1]  # the same evaluation


@pytest.mark.slow
def test_a_tracker_that_fails_is_one_warning(tmp_path: Path, mine: str, capfd: Any) -> None:
    with follow(tmp_path / "run", f"{mine}:Broken"):
        write_run(tmp_path / "run")
    (warning,) = capfd.readouterr().err.splitlines()
    assert "mine.py:Broken has failed (OSError: the server is gone); the run goes on without it" in warning
    (log,) = (tmp_path / "run" / "logs").glob("tracker-*.log")
    assert "Traceback" in log.read_text()


@pytest.mark.slow
def test_a_tracker_that_blocks_is_left_behind(tmp_path: Path, mine: str, capfd: Any) -> None:
    with follow(tmp_path / "run", f"{mine}:Stuck", end_wait_s=5.0):
        write_run(tmp_path / "run")
        before = time.monotonic()
    assert time.monotonic() - before < 100  # it sleeps 1,000 s
    assert "has not taken the rest within 5 s" in capfd.readouterr().err


def test_the_names_of_several_trackers(tmp_path: Path) -> None:
    write_run_id(tmp_path, "wandb", "abc")
    write_run_id(tmp_path, "mlflow", "def")
    assert (read_run_id(tmp_path, "wandb"), read_run_id(tmp_path, "mlflow")) == ("abc", "def")
    assert read_run_id(tmp_path / "elsewhere", "wandb") is None


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("parallel3d.monitor.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        find_tracker("wandb")
    with pytest.raises(ConfigError, match="'no-such': is not a tracker. Use one of wandb, mlflow"):
        find_tracker("no-such")
    with pytest.raises(ConfigError, match="Did you mean wandb?"):
        find_tracker("wanbd")
    assert track.main([str(tmp_path), "--to", f"{__file__}:notes"]) == 2
    assert "is not a run folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_does_not_start_with_a_tracker_that_is_not_there(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "mine.py").write_text("class Mine:\n    def __init__(self, run): ...\nclass Empty: ...\n")
    check_tracker("tensorboard")
    check_tracker(f"{tmp_path / 'mine.py'}:Mine")
    broken, empty = f"{tmp_path / 'broken.py'}:X", f"{tmp_path / 'mine.py'}:Empty"
    mistakes = (
        ("wanbd", "Did you mean wandb"),
        (broken, "broken.py, line 1.*ZeroDivision"),
        (empty, r"mine.py, line 3: it is called with 1 argument, and Empty\(\) takes others"),
    )
    for name, said in mistakes:
        with pytest.raises(UserError, match=said):
            check_tracker(name)
        command = ["train", "--config", "quickstart", f"monitor.trackers={json.dumps([name])}"]
        assert main([*command, f"run.directory={tmp_path / 'run'}"]) == 2
        assert re.search(said, capsys.readouterr().err) and not (tmp_path / "run" / "metrics.jsonl").exists()


# --- the real clients, offline ----------------------------------------------------------------------------------------


def send(path: Path, tracker: str, **environment: str) -> None:
    """Sends a finished run twice, as a run and its resume do; the second time with one more step."""
    for first, last in ((0, 2), (2, 3)):
        write_run(path, first=first, last=last)
        command = [sys.executable, "-m", "parallel3d", "track", str(path), "--to", tracker, "--project", "tests"]
        known = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, env={**known, **environment}, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (path / SUMMARY).exists()


@pytest.mark.slow
@pytest.mark.full
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the client library mlflow (or mlflow-skinny) is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    send(tmp_path / "run", "mlflow")
    client = MlflowClient(tracking_uri=(tmp_path / "run" / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["model.hidden_size"] == "4"
    steps = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert steps == {1: 3.0, 2: 2.0, 3: 1.0}
    assert run.data.metrics["evaluation/loss"] == 3.0


@pytest.mark.slow
@pytest.mark.full
def test_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the client library wandb is not installed")
    path = tmp_path / "run"
    send(path, "wandb", WANDB_MODE="offline")
    files, run_id = sorted((path / "wandb").glob("offline-run-*/*.wandb")), read_run_id(path, "wandb")
    for file, losses in zip(files, ({1: 3.0, 2: 2.0}, {1: 3.0, 2: 2.0, 3: 1.0}), strict=True):
        records = read_records(file)
        assert record_of(records, "run").run_id == run_id  # both starts are one run
        rows = history_of(records)
        assert {row["step"]: row["train/loss"] for row in rows if "train/loss" in row} == losses
        assert [row["evaluation/loss"] for row in rows if "evaluation/loss" in row] == [3.0]


@pytest.mark.slow
@pytest.mark.full
def test_trackio(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="the client library trackio is not installed")
    path = tmp_path / "run"
    send(path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    (database,) = (tmp_path / "trackio").glob("tests*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    assert {name for name, _, _ in rows} == {read_run_id(path, "trackio")}
    assert {step for _, step, text in rows if b"train/loss" in bytes(text)} == {1, 2, 3}
