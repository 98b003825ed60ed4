"""The runs of a study: short real runs in one folder, one after the other; finished ones are read, not repeated."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parallel3d.commands.short_runs import short_run_fields
from parallel3d.config.load import resolve
from parallel3d.config.schema import CheckpointConfig, Config
from parallel3d.door.callbacks import Callback, Line, StopTraining
from parallel3d.door.train_call import train
from parallel3d.errors import EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, UserError
from parallel3d.monitor.run_folder import CONFIG, METRICS, SUMMARY, read_metrics
from parallel3d.studies.study_run import StudyRun

RESULT = "result.json"
NUM_TAIL_CHARACTERS = 2000

FindSign = Callable[[float | None, float | None], str]
"""Gets the loss and the gradient norm of each step; returns why to stop, or ""."""


class SignWatcher(Callback):
    """Stops a run at the first sign."""

    def __init__(self, find_sign: FindSign):
        self._find_sign = find_sign
        self.sign = ""

    def on_step(self, line: Line) -> None:
        """Raises StopTraining."""
        loss, norm = line.get("loss"), line.get("grad_norm")
        self.sign = self._find_sign(
            loss if isinstance(loss, float) else None, norm if isinstance(norm, float) else None
        )
        if self.sign:
            raise StopTraining


class StudyRunner:
    """Runs what a study asks for, below `out`."""

    def __init__(self, out: Path, *, num_runs: int):
        """num_runs: how many at most, for the progress."""
        self._out = out
        self._num_runs = num_runs
        self._count = 0
        self._was_stopped = False
        """Whether the last run was, by a sign."""
        out.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, config: Config, find_sign: FindSign | None = None, *, judged_by: str = "") -> StudyRun:
        """Trains `config`, the configuration of a short run, in the folder `name`; or reads what an earlier call found.

        A run that diverges, lacks memory, or is stopped by `find_sign` is a result, with `ended` saying so. Raises
        UserError where it fails for another reason. A run that was stopped is kept for the same `judged_by` only, which
        says what `find_sign` compares with.
        """
        self._count += 1
        folder, done = self._out / name, self._out / f"{name}.json"
        request = _without_folders(config)
        saved = _read_json(done)
        if saved.get("request") == request and saved.get("stopped_by") in (None, judged_by):
            run = StudyRun.from_json(saved["run"])
            self._report(run, "from an earlier call")
            return run
        started = time.monotonic()
        run = self._train(name, config, find_sign, folder)
        stopped_by = judged_by if self._was_stopped else None
        _write_json(done, {"request": request, "stopped_by": stopped_by, "run": run.to_json()})
        self._report(run, f"{time.monotonic() - started:.0f} s")
        return run

    def skip(self, name: str, why: str) -> None:
        """Reports a run that is not needed any more."""
        self._count += 1
        self._print(f"{name}: not run, {why}")

    def folder_of(self, name: str) -> Path:
        return self._out / name

    def write_result(self, result: dict[str, Any]) -> Path:
        """Writes the study's result next to the runs; returns the file."""
        path = self._out / RESULT
        _write_json(path, result)
        return path

    def _train(self, name: str, config: Config, find_sign: FindSign | None, folder: Path) -> StudyRun:
        watcher = SignWatcher(find_sign) if find_sign else None
        result = train(config, callbacks=[watcher] if watcher else [], check=False, quiet=True)
        ended = watcher.sign if watcher else ""
        self._was_stopped = bool(ended)
        if not ended and result.exit_code == EXIT_DIVERGED:
            ended = f"divergence: {result.summary.get('message', '')}"
        if not ended and result.exit_code == EXIT_OUT_OF_MEMORY:
            ended = "no memory"
        if not ended and result.exit_code:
            text = str(result.summary.get("message") or "no message; its logs are in that folder")
            raise UserError(f"the run in {folder} ended with code {result.exit_code}: {text[-NUM_TAIL_CHARACTERS:]}")
        lines = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
        return StudyRun.of_lines(name, config.run.seed, lines, ended=ended)

    def _report(self, run: StudyRun, how: str) -> None:
        loss = run.judged_loss
        figures = f"ended early, {run.ended}" if run.ended else "no loss" if loss is None else f"loss {loss:.4f}"
        self._print(f"{run.name}: {figures} ({how})")

    def _print(self, text: str) -> None:
        print(f"run {self._count} of at most {self._num_runs}: {text}", file=sys.stderr, flush=True)


def study_config(
    config: Config, folder: Path, *, num_steps: int, changes: Mapping[str, Mapping[str, Any]] | None = None
) -> Config:
    """The configuration of a run of a study: the first steps of a resolved one, and an evaluation after the last.

    changes: fields by section. Raises ConfigError if they break a rule.
    """
    checkpoint = CheckpointConfig(save_at_end=False, directory=str(folder / "checkpoints"))
    fields = short_run_fields(config, folder, num_steps=num_steps, checkpoint=checkpoint)
    fields["run"] |= {"evaluate_at_end": True}
    fields["monitor"] |= {"divergence": "stop"}
    for section, values in (changes or {}).items():
        fields[section] |= dict(values)
    return resolve(Config.model_validate(fields), config_path="")


def read_run_folder(folder: Path) -> tuple[StudyRun, dict[str, Any]]:
    """The figures and the configuration of a finished run. Raises UserError where the folder holds none."""
    config = read_config(folder)
    try:
        lines = read_metrics(folder / METRICS)
        seed = int(config["run"]["seed"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} is not the folder of a run: can't read {METRICS} and {CONFIG} ({error})") from None
    code = _read_json(folder / SUMMARY).get("exit_code")
    ended = "" if code == 0 else "no memory" if code == EXIT_OUT_OF_MEMORY else f"exit code {code}"
    run = StudyRun.of_lines(str(folder), seed, lines, ended=ended)
    return run, config


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved configuration of a run folder; {} without one."""
    return _read_json(folder / CONFIG)


def print_line(text: str) -> None:
    print(text, flush=True)


def _without_folders(config: Config) -> dict[str, Any]:
    """What decides the run's figures: a moved study is still the same one."""
    fields: dict[str, Any] = json.loads(config.model_dump_json())
    fields["run"].pop("directory")
    fields["checkpoint"].pop("directory")
    return fields


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; {} without one, or where a call was killed while it wrote."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(path: Path, data: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n")
    os.replace(temporary, path)
