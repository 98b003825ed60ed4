"""The run folder: all files of a run, written by one process.

config.json        the resolved configuration; starts the same run again
environment.json   versions, machine, device, commit, command line, working directory
metrics.jsonl      a line per step, and a line with "event" for everything else; a resumed run's from its first start
lost-steps.jsonl   lines of steps that were lost in a restart
summary.json       how the run ended, with its figures
results.json       the contents of summary.json, config.json and environment.json, in one file for other programs
loss.png, ...      charts (charts.py); launch/report.py redraws them
report.html        the page of the run (report_page); `parallel3d report --html` writes it again
tensorboard/       the same figures for TensorBoard, with monitor.tensorboard
logs/rank-N.log    output of worker N
uploads.jsonl      what happened at checkpoint.upload, of all starts (commands/upload_follower.py)
evaluations/       results of checkpoints on further texts and tasks (evaluation/saved_results.py)
dumps/, profile/   files of debug.dump_tensors and debug.profile, written by the workers
previous-N/        files of an earlier run: nothing is overwritten
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

from parallel3d.errors import UserError
from parallel3d.monitor.paid_time import PaidTime

CONFIG, ENVIRONMENT, METRICS, SUMMARY = "config.json", "environment.json", "metrics.jsonl", "summary.json"
CHARTS, LOGS, LOCK, LOST_STEPS = ("loss.png", "course.png", "instability.png"), "logs", ".lock", "lost-steps.jsonl"
DUMPS, TRACES, TENSORBOARD, PAGE = "dumps", "profile", "tensorboard", "report.html"
RESULTS = "results.json"
LOCK_WAIT_S = 2.0
"""How long a process that goes on with a run leaves the one before it to end."""
LOCK_RETRY_S = 0.05
TAIL_BYTES = 2**16
"""What is read at once of the end of a file."""


class RunFolder:
    """An open run folder, created before any worker starts."""

    is_continued = False
    """Whether another process has begun to write the run's files."""
    _lock: TextIO
    _metrics: FileIO

    def __init__(self, path: Path, *, config: str, environment: dict[str, Any], history_until_step: int = 0):
        """Writes `config` (the text of config.json) and the environment. Raises UserError if it can't write there.

        Files of an earlier run are moved to `moved_to`; a run that resumes it takes over the metrics up to step
        `history_until_step`.
        """
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

    @property
    def is_taken(self) -> bool:
        """Whether another process goes on with the run: this one must not write any more."""
        ours = os.fstat(self._lock.fileno())
        try:
            newest = os.stat(self.path / LOCK)
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) != (newest.st_dev, newest.st_ino)

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl, unbuffered. Raises OSError on failure, and leaves no part of it."""
        data = (json.dumps(_strict(line)) + "\n").encode()
        size = os.fstat(self._metrics.fileno()).st_size
        if self._metrics.write(data) < len(data):
            os.ftruncate(self._metrics.fileno(), size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def rewind(self, last_step: int) -> None:
        """Moves the lines of steps and evaluations after `last_step` to lost-steps.jsonl: the run restarts there."""
        self._check_ours()
        path, temporary = self.path / METRICS, self.path / f".{METRICS}"
        lines = read_metrics(path)
        with (self.path / LOST_STEPS).open("a") as lost, temporary.open("w") as kept:
            for line in lines:
                is_lost = line.get("event", "evaluation") == "evaluation" and line.get("step", 0) > last_step
                (lost if is_lost else kept).write(json.dumps(line) + "\n")
        os.replace(temporary, path)
        before, self._metrics = self._metrics, path.open("ab", buffering=0)
        before.close()

    def add_environment(self, facts: dict[str, Any]) -> None:
        """Adds what only a worker knows to environment.json."""
        self._check_ours()
        self._replace(ENVIRONMENT, json.loads((self.path / ENVIRONMENT).read_text()) | facts)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes summary.json, and results.json with the configuration and the environment next to it."""
        self._check_ours()
        self._replace(SUMMARY, _strict(summary))
        files = {"configuration": CONFIG, "environment": ENVIRONMENT}
        parts = {part: json.loads((self.path / name).read_text()) for part, name in files.items()}
        self._replace(RESULTS, {"summary": _strict(summary), **parts})

    def _replace(self, name: str, contents: dict[str, Any]) -> None:
        temporary = self.path / f".{name}"
        temporary.write_text(json.dumps(contents, indent=2) + "\n")
        os.replace(temporary, self.path / name)

    def close(self) -> None:
        self._metrics.close()
        self._lock.close()

    def _check_ours(self) -> None:
        """Raises OSError once another process goes on with the run."""
        if self.is_taken:
            raise OSError(errno.EBUSY, "another process goes on with the run")


class ContinuedRunFolder(RunFolder):
    """The folder of a run that another process started and this one continues.

    That process has ended, ends within `LOCK_WAIT_S`, or was frozen with its host, for who knows how long: then this
    one takes the folder from it. It gets a lock and a metrics.jsonl of its own in the places of those, so what the
    other process still appends when it wakes up goes to files without a name, and it finds that it has lost the rest.
    If the folder can't be opened, each attempt to write raises the OSError of the opening.
    """

    is_continued = True

    def __init__(self, path: Path):
        self.path, self.moved_to = path, None
        self._open_error: OSError | None = None
        deadline = time.monotonic() + LOCK_WAIT_S
        while not self._open():
            if time.monotonic() >= deadline:
                self._take()
                break
            time.sleep(LOCK_RETRY_S)

    @property
    def is_taken(self) -> bool:
        return self._open_error is None and super().is_taken

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
        """Opens the folder; False while the process before holds the lock."""
        try:
            self._lock = (self.path / LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _drop_partial_line(self.path / METRICS)
            self._metrics = (self.path / METRICS).open("ab", buffering=0)
            self._open_error = None
        except OSError as error:
            self._open_error = error
        return not isinstance(self._open_error, BlockingIOError)

    def _take(self) -> None:
        """Opens the folder though another process holds the lock."""
        new_lock, new_metrics = self.path / f"{LOCK}.new", self.path / f".{METRICS}"
        try:
            self._lock = new_lock.open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(new_lock, self.path / LOCK)
            shutil.copyfile(self.path / METRICS, new_metrics)
            _drop_partial_line(new_metrics)
            os.replace(new_metrics, self.path / METRICS)
            self._metrics = (self.path / METRICS).open("ab", buffering=0)
            self._open_error = None
        except OSError as error:
            self._open_error = error

    def _check(self) -> None:
        if self._open_error is not None:
            raise self._open_error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, without a last line that a crash cut short."""
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """As `read_metrics`, one line in memory at a time."""
    with path.open() as file:
        for line in file:
            if line.endswith("\n") and line != "\n":
                yield json.loads(line)


def iterate_metrics_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """As `read_metrics`, from the last line to the first; reads at most `TAIL_BYTES` more than the lines taken."""
    with path.open("rb") as file:
        end, rest, is_cut = file.seek(0, os.SEEK_END), b"", True
        while end:
            start = max(0, end - TAIL_BYTES)
            file.seek(start)
            block, end = file.read(end - start) + rest, start
            if is_cut:  # what follows the last newline is not a line
                block, newline, _ = block.rpartition(b"\n")
                is_cut = not newline
            rest, *lines = block.split(b"\n")
            yield from (json.loads(line) for line in reversed(lines) if line)
        if rest:
            yield json.loads(rest)


def _drop_partial_line(path: Path) -> None:
    """Removes a last line that a crash cut short, so that another can follow."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - TAIL_BYTES)
            file.seek(start)
            if (newline := file.read(end - start).rfind(b"\n")) >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)


def _copy_history(source: Path, target: Path, last_step: int) -> None:
    """Copies the lines before the first one of a step after `last_step`; of later ones the seconds (paid_time.py)."""
    if not source.exists():
        return
    paid_time, copied_s = PaidTime(), None
    with target.open("w") as file:
        for line in iterate_metrics(source):
            if copied_s is None and line.get("step", 0) > last_step:
                copied_s = paid_time.seconds()
            if copied_s is None:
                file.write(json.dumps(line) + "\n")
            paid_time.log(line)
        if copied_s is not None and (seconds := paid_time.seconds() - copied_s) > 0:
            left_behind = {"event": "left_behind", "step": last_step, "seconds": round(seconds, 3)}
            file.write(json.dumps(left_behind) + "\n")


def _archive_previous_run(path: Path) -> Path | None:
    """Moves an earlier run's files to the next free previous-N and returns it; None if there are none."""
    files = (CONFIG, ENVIRONMENT, METRICS, LOST_STEPS, SUMMARY, RESULTS, *CHARTS, PAGE)
    old = [path / name for name in (*files, LOGS, DUMPS, TRACES, TENSORBOARD) if (path / name).exists()]
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
    """Replaces nan and inf, which JSON lacks, by the strings "nan", "inf" and "-inf", which float() reads."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def is_being_written(path: Path) -> bool:
    """Whether a process holds the lock of a run folder: its run goes on."""
    try:
        with (path / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases it
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
