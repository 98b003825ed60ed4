"""A real run and its resume at each tracker, by the real client offline: every figure arrives once, in one run."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import parallel3d
from parallel3d.monitor.tracker_ids import read_run_id
from tests.support.wandb_file import history_of, read_records, record_of

pytestmark = [pytest.mark.slow, pytest.mark.full]
Json = dict[str, Any]
Figures = list[tuple[int, str, float]]
"""(step, name, value), sorted."""
PROJECT = "tests"
OF_WANDB = {"_step", "_timestamp", "_runtime"}
NO_CURVE = {"num_updates", "time"}


def sent_figures(path: Path, first: int) -> Figures:
    """The figures of the lines of metrics.jsonl that are sent: of the steps from `first` on, and of evaluations."""
    figures = []
    for line in map(json.loads, path.read_text().splitlines()):
        event, step = line.pop("event", None), line.pop("step", 0)
        if event in (None, "evaluation") and step >= first:
            names = [name for name, value in line.items() if type(value) in (int, float) and name not in NO_CURVE]
            figures += [(step, f"{event or 'train'}/{name}", line[name]) for name in names]
    return sorted(figures)


def read_wandb(folder: Path, run_id: str, config: Mapping[str, Any]) -> Figures:
    """Those of two files of one run, each with the configuration and its end."""
    figures, files = [], sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    for file in files:
        records = read_records(file)
        run = record_of(records, "run")
        assert (run.run_id, run.project, run.resume) == (run_id, PROJECT, True)
        sent = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert sent["model"] == config["model"] and record_of(records, "exit").exit_code == 0
        for row in history_of(records):
            figures += [(row["step"], name, row[name]) for name in row.keys() - OF_WANDB - {"step"}]
    return sorted(figures)


def read_mlflow(folder: Path, run_id: str, config: Mapping[str, Any]) -> Figures:
    """Those of the only run of the file store."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name(PROJECT).experiment_id])
    assert (run.info.run_id, run.info.status) == (run_id, "FINISHED")
    assert run.data.params["model.hidden_size"] == str(config["model"]["hidden_size"])
    histories = [client.get_metric_history(run_id, name) for name in run.data.metrics]
    return sorted((metric.step, metric.key, metric.value) for history in histories for metric in history)


def read_trackio(folder: Path, run_id: str, config: Mapping[str, Any]) -> Figures:
    """Those of the only run of the database."""
    (database,) = (folder.parent / "trackio").glob(f"{PROJECT}*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        sent = [json.loads(text) for (text,) in connection.execute("SELECT config FROM configs")]
    assert {name for name, _, _ in rows} == {run_id} and [each["model"] for each in sent] == [config["model"]]
    return sorted((step, name, value) for _, step, text in rows for name, value in json.loads(text).items())


READERS: dict[str, Callable[[Path, str, Mapping[str, Any]], Figures]] = {
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


@pytest.mark.parametrize("tracker", READERS)
def test_every_figure_of_a_run_and_its_resume(
    tiny: Json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    pytest.importorskip(tracker, reason=f"the client library {tracker} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    tiny["monitor"] |= {"trackers": [tracker], "tracker_project": PROJECT}
    tiny["run"]["evaluate_every"] = 2
    tiny["lr_schedule"] = {"decay_steps": 6}
    folder, run_ids, expected = tiny["run"]["directory"], [], []
    for first, overrides in ((1, {"run.num_steps": 3}), (4, {"run.resume": "auto"})):
        result = parallel3d.train(tiny, overrides, quiet=True)
        run_ids.append(read_run_id(folder, tracker))
        expected += sent_figures(folder / "metrics.jsonl", first)
    assert [step for step, name, _ in expected if name == "train/loss"] == [1, 2, 3, 4, 5, 6]
    assert [step for step, name, _ in expected if name == "evaluation/loss"] == [2, 3, 4, 6]
    assert run_ids[0] == run_ids[1] is not None
    assert READERS[tracker](folder, run_ids[0], result.config) == sorted(expected)
