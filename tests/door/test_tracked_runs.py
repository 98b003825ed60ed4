"""A real run and its resume at Weights & Biases, by the real client offline: every figure arrives, in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import parallel3d
from parallel3d.monitor.tracker_ids import read_run_id
from tests.support.wandb_file import history_of, read_records, record_of

pytestmark = [pytest.mark.slow, pytest.mark.full]
Json = dict[str, Any]
OF_WANDB = {"_step", "_timestamp", "_runtime"}
NO_CURVE = {"num_updates", "time"}


def sent_lines(path: Path, first: int) -> list[Json]:
    """The figures of the lines of metrics.jsonl that are sent: of the steps from `first` on, and of evaluations."""
    rows = []
    for line in map(json.loads, path.read_text().splitlines()):
        event, step = line.pop("event", None), line.pop("step", 0)
        if event in (None, "evaluation") and step >= first:
            names = [name for name, value in line.items() if type(value) in (int, float) and name not in NO_CURVE]
            rows.append({"step": step, **{f"{event or 'train'}/{name}": line[name] for name in names}})
    return rows


def test_wandb_holds_every_figure_of_a_run_and_its_resume(tiny: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the client library wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tiny["monitor"] |= {"trackers": ["wandb"], "tracker_project": "tests"}
    tiny["run"]["evaluate_every"] = 2
    tiny["lr_schedule"] = {"decay_steps": 6}
    folder, expected = tiny["run"]["directory"], []
    for first, overrides in ((1, {"run.num_steps": 3}), (4, {"run.resume": "auto"})):
        result = parallel3d.train(tiny, overrides, quiet=True)
        expected.append(sent_lines(folder / "metrics.jsonl", first))
    steps = [[row["step"] for row in rows] for rows in expected]
    assert steps == [[1, 2, 2, 3, 3], [4, 4, 5, 6, 6]]  # with evaluations

    run_id = read_run_id(folder, "wandb")
    for rows, file in zip(expected, sorted((folder / "wandb").glob("offline-run-*/*.wandb")), strict=True):
        records = read_records(file)
        run = record_of(records, "run")
        assert (run.run_id, run.project, run.resume) == (run_id, "tests", True)
        held = [{name: row[name] for name in row.keys() - OF_WANDB} for row in history_of(records)]
        assert held == rows
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["model"] == result.config["model"]
        assert record_of(records, "exit").exit_code == 0
