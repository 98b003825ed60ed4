"""Sends the figures of a run to an experiment tracker: `parallel3d track RUN_FOLDER --to wandb`.

Of a run that goes on it follows metrics.jsonl until the run has ended; of a finished one it sends all lines.
`monitor.trackers` starts it beside the run. Exit codes: 0 sent, 1 the tracker has failed, 2 invalid input.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from parallel3d.commands.parsers import parse
from parallel3d.errors import UserError
from parallel3d.monitor.metrics_tail import MetricsTail
from parallel3d.monitor.run_folder import CONFIG, LOGS, METRICS, SUMMARY
from parallel3d.monitor.tensorboard import scalars
from parallel3d.monitor.tracker_ids import read_run_id, write_run_id
from parallel3d.monitor.trackers import TrackedRun, Tracker, find_tracker

POLL_S = 0.5
START_WAIT_S = 3600.0
"""Longest wait for the run's first line."""


def main(arguments: list[str]) -> int:
    options = parse("track", arguments)
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # in this process alone: mlflow-skinny has no database
    try:
        make = find_tracker(options.to)
        if options.check:
            return 0
        if not (options.since or (options.folder / METRICS).exists()):
            raise UserError(f"{options.folder} is not a run folder: it has no {METRICS}")
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    follower = Follower(options.folder, options.to, since_s=options.since, parent=os.getppid())
    try:
        return follower.run(make, project=options.project, name=options.name or options.folder.name)
    except Exception as error:  # whatever a client raises
        traceback.print_exc()
        text = str(error).splitlines()[0] if str(error) else ""
        follower.warn(f"monitor.trackers: {options.to} has failed ({type(error).__name__}: {text[:200]})")
        return 1


class Follower:
    """Hands the lines of a run to its tracker until the run, or the process that has started this one, has ended."""

    def __init__(self, folder: Path, tracker: str, *, since_s: float, parent: int):
        self._folder, self._tracker, self._since_s, self._parent = folder, tracker, since_s, parent
        self._is_live = since_s > 0
        self._terminal = os.dup(2)

    def run(self, make: Any, *, project: str, name: str) -> int:
        tail, deadline_s = MetricsTail(self._folder / METRICS, since_s=self._since_s), time.monotonic() + START_WAIT_S
        while not (lines := tail.new_lines()):
            if self._has_ended() or time.monotonic() > deadline_s:
                return 0
            time.sleep(POLL_S)
        if self._is_live:
            self._redirect_output()
        is_resumed = any(line.get("event") == "started" and line["step"] > 0 for line in lines)
        known = read_run_id(self._folder, self._tracker) if is_resumed or not self._is_live else None
        config = json.loads((self._folder / CONFIG).read_text())
        run = TrackedRun(
            folder=self._folder,
            project=project,
            name=name,
            config=config,
            run_id=known,
            environment=os.environ,
            history=tail.history() if self._is_live else (),
        )
        tracker: Tracker = make(run)
        write_run_id(self._folder, self._tracker, tracker.run_id)
        while True:
            is_over = self._has_ended()  # before the last lines are read
            for line in lines:
                if values := dict(scalars(line)):
                    tracker.log(line["step"], values)
            if is_over and not (lines := tail.new_lines()):
                break
            if not is_over:
                time.sleep(POLL_S)
                lines = tail.new_lines()
        path = self._folder / SUMMARY
        summary = json.loads(path.read_text()) if path.exists() else {}
        tracker.finish(summary.get("exit_code", 1), summary)
        return 0

    def _has_ended(self) -> bool:
        """Whether the run has: it has a summary of this start, or the process that guards it is gone."""
        path = self._folder / SUMMARY
        has_summary = path.exists() and path.stat().st_mtime >= self._since_s
        return has_summary or not self._is_live or os.getppid() != self._parent

    def _redirect_output(self) -> None:
        """Sends what the client prints to a log of its own."""
        name = self._tracker.replace("/", "_").replace(":", "-")
        with (self._folder / LOGS / f"tracker-{name}.log").open("ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)

    def warn(self, text: str) -> None:
        os.write(self._terminal, f"{text}; the run goes on without it\n".encode())
