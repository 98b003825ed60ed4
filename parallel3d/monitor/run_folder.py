"""The run folder: everything that a run leaves behind, written by one process.

config.json        the configuration as resolved; starts the same run again
environment.json   versions, machine, commit, command line
metrics.jsonl      a line per step, and a line with "event" for whatever else happened; of a resumed run from its start
lost-steps.jsonl   lines of steps that were lost with a restart
summary.json       how the run ended, with its figures
loss.png, ...      charts (charts.py); launch/report.py draws them anew
tensorboard/       the same figures for TensorBoard, where monitor.tensorboard asks for them
logs/rank-N.log    what worker N printed
dumps/, profile/   what debug.dump_tensors and debug.profile ask for, written by the workers themselves
previous-N/        an earlier run's files: nothing is overwritten
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from parallel3d.errors import UserError

CONFIG, ENVIRONMENT, METRICS, SUMMARY = "config.json", "environment.json", "metrics.jsonl", "summary.json"
CHARTS, LOGS, LOCK, LOST_STEPS = ("loss.png", "course.png", "instability.png"), "logs", ".lock", "lost-steps.jsonl"
DUMPS, TRACES, TENSORBOARD = "dumps", "profile", "tensorboard"
LOCK_WAIT_S = 2.0
LOCK_RETRY_S = 0.05


class RunFolder:
    """An open run folder. Made before any worker starts; raises UserError where it can't be written."""

    def __init__(self, path: Path, *, config: str, environment: dict[str, Any], history_until_step: int = 0):
        """`config`: the text of config.json. Files of an earlier run are moved into `moved_to`; where this run goes on
        with it, its lines up to step `history_until_step` are taken over."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.moved_to = _archive_previous_run(path)
            (path / LOGS).mkdir()
            (path / CONFIG).write_text(config.rstrip() + "\n")
            (path / ENVIRONMENT).write_text(json.dumps(environment, indent=2) + "\n")
            if self.moved_to and history_until_step:
                _copy_history(self.moved_to / METRICS, path / METRICS, history_until_step)
            self._metrics = (path / METRICS).open("ab", buffering=0)
        except BlockingIOError:
            raise UserError(
                f"another run is writing into {path}: wait for it, or set run.directory to another folder"
            ) from None
        except OSError as error:
            raise UserError(
                f"can't write the run folder {path} ({error.strerror}): set run.directory to one that you may write"
            ) from None

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl, on disk before this returns as far as Python decides; raises OSError
        where not all of it can be written, and nothing of it stays."""
        data = (json.dumps(_strict(line)) + "\n").encode()
        size = os.fstat(self._metrics.fileno()).st_size
        if self._metrics.write(data) < len(data):
            os.ftruncate(self._metrics.fileno(), size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def rewind(self, last_step: int) -> None:
        """The run goes on after that step: lines of later ones, evaluations included, go to lost-steps.jsonl."""
        path, temporary = self.path / METRICS, self.path / f".{METRICS}"
        lines = read_metrics(path)
        with (self.path / LOST_STEPS).open("a") as lost, temporary.open("w") as kept:
            for line in lines:
                is_lost = line.get("event", "evaluation") == "evaluation" and line.get("step", 0) > last_step
                (lost if is_lost else kept).write(json.dumps(line) + "\n")
        os.replace(temporary, path)
        before, self._metrics = self._metrics, path.open("ab", buffering=0)
        before.close()

    def write_summary(self, summary: dict[str, Any]) -> None:
        temporary = self.path / f".{SUMMARY}"
        temporary.write_text(json.dumps(_strict(summary), indent=2) + "\n")
        os.replace(temporary, self.path / SUMMARY)

    def close(self) -> None:
        self._metrics.close()
        self._lock.close()


class ContinuedRunFolder(RunFolder):
    """The folder of a run that another process has begun and this one goes on with.

    Where it can't be opened, each attempt to write raises the OSError that says why.
    """

    def __init__(self, path: Path):
        self.path, self.moved_to = path, None
        self._open_error: OSError | None = None
        deadline = time.monotonic() + LOCK_WAIT_S
        while not self._open() and time.monotonic() < deadline:
            time.sleep(LOCK_RETRY_S)

    def append_metrics(self, line: dict[str, Any]) -> None:
        self._check()
        super().append_metrics(line)

    def rewind(self, last_step: int) -> None:
        self._check()
        super().rewind(last_step)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._check()
        super().write_summary(summary)

    def close(self) -> None:
        if self._open_error is None:
            super().close()

    def _open(self) -> bool:
        """False while the lock is held: it ends with the process that is lost."""
        try:
            self._lock = (self.path / LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _drop_partial_line(self.path / METRICS)
            self._metrics = (self.path / METRICS).open("ab", buffering=0)
            self._open_error = None
        except OSError as error:
            self._open_error = error
        return not isinstance(self._open_error, BlockingIOError)

    def _check(self) -> None:
        if self._open_error is not None:
            raise self._open_error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a crash has cut is left out."""
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def _drop_partial_line(path: Path) -> None:
    """Takes away a last line that a crash has cut, so that another can follow."""
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _copy_history(source: Path, target: Path, last_step: int) -> None:
    """The lines before the first one of a step after `last_step`."""
    if not source.exists():
        return
    with target.open("w") as file:
        for line in read_metrics(source):
            if line.get("step", 0) > last_step:
                break
            file.write(json.dumps(line) + "\n")


def _archive_previous_run(path: Path) -> Path | None:
    """Moves an earlier run's files into the next free previous-N; None when there are none."""
    old = [
        path / name
        for name in (CONFIG, ENVIRONMENT, METRICS, LOST_STEPS, SUMMARY, *CHARTS, LOGS, DUMPS, TRACES, TENSORBOARD)
        if (path / name).exists()
    ]
    if not old:
        return None
    number = 1
    while (target := path / f"previous-{number}").exists():
        number += 1
    target.mkdir()
    for file in old:
        os.rename(file, target / file.name)
    return target


def _strict(value: Any) -> Any:
    """JSON has no nan or inf: they become the strings "nan", "inf" and "-inf", which float() reads."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
