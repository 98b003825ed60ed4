"""Rules, schedules, families, trackers and callbacks of installed packages, by their entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from parallel3d.monitor.run_folder import METRICS, iterate_metrics
from tests.extending.copies import ROOT

EXTENDING = Path(__file__).parent
FILES = {
    "update_rules": "ademamix",
    "schedules": "eager_1f1b",
    "families": "starcoder2",
    "lr_schedules": "exponential_decay",
}
NAMES = {"update_rules": "RULE", "schedules": "SCHEDULE", "families": "FAMILY", "lr_schedules": "halve_three_times"}
SCRIPT = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    from parallel3d.config.schema import Config
    from parallel3d.config.load import load_config, resolve
import sys
config = resolve(load_config(sys.argv[1], ["optimizer.beta3=0.5"]), config_path="a")
from parallel3d.decay_shapes import find_shape
shape = find_shape(config.lr_schedule.kind)
found = [shape(1.0), config.optimizer.kind, config.optimizer.beta3, config.parallel.schedule, config.model.architecture]
print(json.dumps([*found, "torch" in sys.modules, [str(each.message) for each in caught]]))
"""


def installed_package(site: Path, entry_points: str) -> dict[str, str]:
    """Writes the metadata of a package in `site`; returns an environment that has it."""
    info = site / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}


def run_in(environment: dict[str, str], *command: object) -> str:
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def package_of_four(site: Path, broken: str = "") -> dict[str, str]:
    """The rule, the schedules and the family of docs/extending.md as the modules of another package; `broken` is one
    more of the last group."""
    groups = [f"[parallel3d.{group}]\nmine = mine_{file}:{NAMES[group]}\n" for group, file in FILES.items()]
    environment = installed_package(site, "\n".join([*groups, broken]))
    for file in FILES.values():
        (site / f"mine_{file}.py").write_text((EXTENDING / f"{file}.py").read_text())
    return environment


def config_of_four(**others: Any) -> dict[str, Any]:
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    return {
        "model": dict(architecture="starcoder2", vocab_size=257, **sizes),
        "parallel": {"schedule": "eager-1f1b", "pp_size": 2},
        "batch": {"sequence_length": 8, "global_batch_size": 4, "micro_batch_size": 1},
        "optimizer": {"kind": "ademamix", "learning_rate": 0.01},
        "lr_schedule": {"kind": "mine", "decay_steps": 4},
        **others,
    }


def test_a_package_brings_a_rule_a_schedule_and_a_family(tmp_path: Path) -> None:
    """No torch is imported for them; one that can't be imported is a warning."""
    site = tmp_path / "site"
    environment = package_of_four(site, broken="broken = mine_broken:shape\n")
    (site / "mine_broken.py").write_text("\n1 / 0\n")
    (tmp_path / "a.json").write_text(json.dumps(config_of_four(run={"num_steps": 4})))
    *found, has_torch, warnings = json.loads(run_in(environment, "-c", SCRIPT, tmp_path / "a.json"))
    assert found == [0.125, "ademamix", 0.5, "eager-1f1b", "starcoder2"] and not has_torch
    (warning,) = warnings
    assert "parallel3d.lr_schedules: broken = mine_broken:shape" in warning
    assert "mine_broken.py, line 2" in warning and "ZeroDivisionError" in warning


@pytest.mark.slow
@pytest.mark.full
def test_the_workers_of_a_run_have_them(tmp_path: Path) -> None:
    """Two stages train two steps: the rates are those of the schedule, and each stage saves the rule's third state."""
    environment, run = package_of_four(tmp_path / "site"), tmp_path / "run"
    (tmp_path / "text.txt").write_text("a text of some words\n" * 400)
    data = {"sources": [str(tmp_path / "text.txt")], "cache_directory": str(tmp_path), "tokenizer": {"kind": "bytes"}}
    short = {"num_steps": 2, "threads_per_rank": 1, "evaluate_at_end": False, "directory": str(run)}
    config = config_of_four(data=data, monitor={"charts": False}, run=short)
    (tmp_path / "a.json").write_text(json.dumps(config))
    assert "eager-1f1b" in run_in(environment, "-m", "parallel3d", "train", "--config", tmp_path / "a.json")
    rates = [line["lr"] for line in iterate_metrics(run / METRICS) if "event" not in line]
    assert rates == pytest.approx([0.01 * (0.1 + 0.9 * 0.5 ** (3 * step / 4)) for step in (1, 2)])  # to a tenth
    for stage, name in enumerate(("embedding.weight", "head.weight")):
        with safe_open(run / "checkpoints" / "latest" / f"rank-{stage:05}.safetensors", "pt") as file:
            names = file.keys()
        assert any(each.startswith(f"slow_moment/{name}/") for each in names)


OBSERVERS = """
import json
import parallel3d
class Notes:
    def __init__(self, run):
        self.run_id, self.path = "one", run.folder / "notes.jsonl"
        self.path.write_text("")
    def log(self, step, values):
        with open(self.path, "a") as file:
            print(json.dumps([step, values["train/loss"]]), file=file)
    def finish(self, exit_code, summary):
        pass
class Watch(parallel3d.Callback):
    def __init__(self):
        self.seen = []
    def on_step(self, line):
        self.seen.append(line["step"])
    def on_end(self, result):
        print("watched", self.seen)
"""


@pytest.mark.slow
@pytest.mark.full
def test_a_package_brings_a_tracker_and_a_callback(tmp_path: Path) -> None:
    """Both follow a run of three steps by the names of their entry points; `track` sends its figures again."""
    names = "[parallel3d.trackers]\nnotes = observers:Notes\n[parallel3d.callbacks]\nwatch = observers:Watch\n"
    environment, run = installed_package(tmp_path / "site", names), tmp_path / "run"
    (tmp_path / "site" / "observers.py").write_text(OBSERVERS)
    (tmp_path / "text.txt").write_text("a text of some words\n" * 400)
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    tokenizer = {"kind": "bytes"}
    config = {
        "model": {"vocab_size": 257, **sizes},
        "batch": {"global_batch_size": 2, "micro_batch_size": 1, "sequence_length": 16},
        "optimizer": {"learning_rate": 0.01},
        "data": {"sources": [str(tmp_path / "text.txt")], "cache_directory": str(tmp_path), "tokenizer": tokenizer},
        "monitor": {"charts": False, "trackers": ["notes"]},
        "run": {"num_steps": 3, "threads_per_rank": 1, "evaluate_at_end": False, "directory": str(run)},
    }
    code = f"import parallel3d; parallel3d.train({config!r}, callbacks=['watch'])"
    assert "watched [1, 2, 3]" in run_in(environment, "-c", code).splitlines()
    losses = [[line["step"], line["loss"]] for line in iterate_metrics(run / METRICS) if "event" not in line]
    noted = [json.loads(line) for line in (run / "notes.jsonl").read_text().splitlines()]
    assert len(losses) == 3 and noted == losses
    (run / "notes.jsonl").unlink()
    run_in(environment, "-m", "parallel3d", "track", run, "--to", "notes")
    assert [json.loads(line) for line in (run / "notes.jsonl").read_text().splitlines()] == losses
