"""Follows a run and copies each checkpoint that it publishes: what `parallel3d upload --follow` does beside a run.

It decides when a pass is due; each pass is a process of its own, which is ended if its store falls silent. One follower
per host is started; a lock in the checkpoint directory lets one of them work, and the next one when its host is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.checkpoint.index import INDEX
from parallel3d.checkpoint.store_process import Stalled, run_watched, say
from parallel3d.checkpoint.upload import take_lock
from parallel3d.errors import CheckpointError
from parallel3d.monitor.run_folder import METRICS
from parallel3d.monitor.upload_history import UPLOADS
from parallel3d.remote_address import redacted

POLL_S = 1.0
AGAIN_S = 60.0
"""How long after a failed pass the next one begins, unless there is a new checkpoint or the run has ended."""


class RunLines:
    """What metrics.jsonl says about this start of the run: from which step it goes on, and whether it trains."""

    def __init__(self, path: Path, *, since_s: float):
        self._path, self._since_s = path, since_s
        self._file_id, self._offset = self._stat(), 0
        self._known_bytes = self._file_id[2] if self._file_id else 0
        """Of a file that was there before; it may be an earlier run's."""
        self.beginning: tuple[float, int] | None = None
        """Time and step of the newest start or restart since `since_s`."""
        self.is_under_way = False
        """Whether the checkpoint directory has none of a line that the run has left: a step has followed the start, or
        it is a restart, which is announced after they were moved."""

    def read(self) -> None:
        """Reads what was added."""
        status = self._stat()
        if status is None:
            return
        if self._file_id is None or status[:2] != self._file_id[:2] or status[2] < self._offset:
            self._file_id, self._offset, self._known_bytes = status, 0, sys.maxsize
        for end, line in self._new_lines():
            event = line.get("event")
            if event in ("started", "restart"):
                if float(line["time"]) >= self._since_s:
                    self.beginning = (float(line["time"]), int(line["step"]))
                    self.is_under_way = event == "restart"
            elif event is None and (self.beginning is not None or end > self._known_bytes):
                self.is_under_way = True

    def _new_lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each line, and where it ends."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            self._offset += len(line)
            yield self._offset, json.loads(line)

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size


class UploadFollower:
    """Keeps a target up to date with a run, until the run has ended or the process that started this one is gone."""

    def __init__(self, options: argparse.Namespace, directory: Path):
        self._options, self._directory = options, directory
        self._dir, self._target = CheckpointDirectory(directory), redacted(options.target)
        self._lines = RunLines(options.folder / METRICS, since_s=options.follow)
        self._parent, self._deadline_s = os.getppid(), float("inf")
        self._lock: IO[bytes] | None = None
        self._done: set[tuple[int, int]] = set()
        """Step and time of the indexes that were here before the last pass that has succeeded."""
        self._tried: set[tuple[int, int]] = set()
        self._tried_to_settle: tuple[float, int] | None = None
        """The start of the run that the last pass was to clear the target for."""
        self._tried_s = -float("inf")
        self._problem = ""
        """Why the last pass has failed."""
        self._settled = {line["of"] for line in self._recorded() if line["event"] == "settled"}
        """Starts of the run after which the target was cleared of what they do not continue."""

    def run(self) -> int:
        while True:
            is_over = self._is_over()
            self._lines.read()
            self._lock = self._lock or self._take_lock()
            has_begun = self._lines.is_under_way or (is_over and self._lines.beginning is not None)
            if self._lock is not None and has_begun and self._is_due(is_over):
                self._pass(is_over)
            elif is_over:
                return self._end()

    # --- one pass ---------------------------------------------------------------------------------------------------

    def _is_due(self, is_over: bool) -> bool:
        here = self._here()
        if here <= self._done and not self._unsettled():
            return False
        if self._problem and is_over and self._tried == here:
            return self._tried_s == -float("inf")
        is_new = not here <= self._tried or self._unsettled() != self._tried_to_settle
        return is_new or is_over or time.monotonic() - self._tried_s >= AGAIN_S

    def _pass(self, is_over: bool) -> None:
        here, options, was_failing = self._here(), self._options, bool(self._problem)
        self._problem, unsettled = "", self._unsettled()
        arguments = ["--checkpoints", str(self._directory), str(options.folder), options.target, "--locked"]
        for name, value in {"--keep-last": options.keep_last, "--keep-every": options.keep_every}.items():
            arguments += [name, str(value)] if value is not None else []
        arguments += ["--share", str(1.0 if is_over else options.share)]
        arguments += ["--continued-from", str(unsettled[1])] if unsettled else []
        assert self._lock is not None
        try:
            code = run_watched(
                "upload",
                arguments,
                self._on_event,
                stall_s=options.stall,
                on_poll=self._on_poll,
                keep_open=[self._lock.fileno()],
            )
            if code:
                self._problem = self._problem or f"its process ended with code {code}"
        except Stalled as error:
            self._problem = str(error)
        self._tried, self._tried_s, self._tried_to_settle = here, time.monotonic(), unsettled
        if self._problem:
            behind = sorted(step for step, _ in self._here() - self._done)
            self._record({"event": "failed", "text": self._problem, "behind": behind})
            if not was_failing and self._deadline_s == float("inf"):
                missing = f". {_steps(behind)} not at {self._target}" if behind else ""
                say(f"checkpoint.upload: {self._problem}{missing}; training goes on")
            return
        self._done = here
        if unsettled:
            self._settled.add(unsettled[0])
            self._record({"event": "settled", "of": unsettled[0], "step": unsettled[1]})
        if was_failing:
            say(f"checkpoint.upload: {self._target} is up to date again")

    def _on_event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "failed":
            self._problem = str(event["text"])
        elif event["event"] != "alive":
            self._record(event)
        if event["event"] == "set_aside":
            text = f"{event['name']} there is not part of this run: its files are kept, it is not listed"
            say(f"checkpoint.upload: {text} ({event['bytes'] / 1e6:,.1f} MB)")

    def _on_poll(self, stdin: IO[bytes]) -> bool:
        if self._is_over(wait_s=0.0) and not stdin.closed:
            stdin.close()  # no pauses from here on
        return time.monotonic() < self._deadline_s

    def _unsettled(self) -> tuple[float, int] | None:
        beginning = self._lines.beginning
        return None if beginning is None or beginning[0] in self._settled else beginning

    def _here(self) -> set[tuple[int, int]]:
        found = set()
        try:
            for step in self._dir.steps():
                found.add((step, (self._dir.path_of(step) / INDEX).stat().st_mtime_ns))
        except (OSError, CheckpointError):  # removed meanwhile; a later look sees what is there
            pass
        return found

    # --- the end ----------------------------------------------------------------------------------------------------

    def _is_over(self, wait_s: float = POLL_S) -> bool:
        """Whether the run has ended: its process has closed the pipe, or is gone."""
        if self._deadline_s < float("inf"):
            return True
        ready, _, _ = select.select([sys.stdin], [], [], wait_s)
        if ready or os.getppid() != self._parent:
            self._deadline_s = time.monotonic() + self._options.end_wait
            self._tried_s = -float("inf")
            return True
        return False

    def _end(self) -> int:
        if self._lock is None or self._lines.beginning is None and not self._done:
            return 0  # another host's follower works, or nothing has begun
        behind = sorted(step for step, _ in self._here() - self._done)
        if not behind:
            if self._done:
                say(f"checkpoint.upload: step {max(self._done)[0]} is at {self._target}")
            return 0
        again = f"parallel3d upload {self._options.folder} {self._target}"
        say(
            f"checkpoint.upload: warning: {_steps(behind)} not at {self._target} ({self._problem});"
            f" the next start of the run sends what is missing, and so does: {again}"
        )
        return 1

    # --- files ------------------------------------------------------------------------------------------------------

    def _take_lock(self) -> IO[bytes] | None:
        try:
            return take_lock(self._directory) if self._lines.beginning or self._lines.is_under_way else None
        except OSError:
            return None

    def _record(self, event: Mapping[str, Any]) -> None:
        line = json.dumps({**event, "time": round(time.time(), 3)}) + "\n"
        try:
            with (self._options.folder / UPLOADS).open("a") as file:
                file.write(line)
        except OSError:  # a full disk: the target may still get its checkpoints
            return

    def _recorded(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in (self._options.folder / UPLOADS).read_text().splitlines()]
        except (OSError, ValueError):
            return []


def _steps(steps: list[int]) -> str:
    named = ", ".join(map(str, steps))
    return f"step {named} is" if len(steps) == 1 else f"steps {named} are"
