"""Shows the figures of a run while it goes on: `parallel3d watch RUN_FOLDER [--every S] [--serve [PORT]]`.

On a terminal the figures are drawn in place; elsewhere they are lines, one for each change of membership, one for each
new result of an evaluated checkpoint and one every 10 s. It only reads: Ctrl-C ends it and leaves the run alone. It
ends with the run, with the run's exit code; 1 if all processes of the run have disappeared, 2 for invalid input, 130
after Ctrl-C.
`--serve` also serves the run's page to this machine (report_page/page_server.py).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TextIO

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.commands.parsers import parse
from parallel3d.errors import UserError
from parallel3d.evaluation.result_figures import figures_by_name
from parallel3d.evaluation.result_history import read_result_history
from parallel3d.evaluation.saved_results import EVALUATIONS, starts_of
from parallel3d.models.initial_weights import checkpoints_of_run
from parallel3d.monitor.metrics_tail import GrowingFile
from parallel3d.monitor.run_folder import CONFIG, METRICS, SUMMARY, is_being_written, read_metrics
from parallel3d.monitor.upload_history import UPLOADS, UploadHistory
from parallel3d.report_page.page_results import brief_results
from parallel3d.report_page.page_server import PageServer
from parallel3d.report_page.terminal_view import MIN_WIDTH, FolderFacts, Screen, describe_in_a_line, draw_lines
from parallel3d.report_page.watched_run import WatchedRun, WidthChange

SCREEN_EVERY_S, LINES_EVERY_S = 1.0, 10.0
DEAD_AFTER_S = 15.0
"""A run whose folder no process holds for so long has died. A coordinator that takes over needs less."""
EXIT_DIED, EXIT_INTERRUPTED = 1, 130


def main(arguments: list[str]) -> int:
    options = parse("watch", arguments)
    try:
        check_folder(options.folder)
        with ExitStack() as stack:
            if options.serve is not None:
                server = stack.enter_context(PageServer(options.folder, port=options.serve))
                print(f"serving the page of the run at {server.address}", flush=True)
            has_screen = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
            display = ScreenDisplay(sys.stdout) if has_screen else LineDisplay(sys.stdout)
            return Watcher(options.folder, display, every_s=options.every or display.every_s).run()
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nstopped watching; the run is left alone", file=sys.stderr)
        return EXIT_INTERRUPTED


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder}: not a folder; give run.directory of a run that has been started")


class Watcher:
    """Reads what is new, shows it, and waits, until the run has ended or died."""

    def __init__(
        self,
        folder: Path,
        display: ScreenDisplay | LineDisplay,
        *,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._folder, self._display, self._every_s = folder, display, every_s
        self._clock, self._sleep = clock, sleep
        self._file, self._run = GrowingFile(folder / METRICS), WatchedRun()
        self._results = NewestResults(folder)
        self._is_waiting = False

    def run(self) -> int:
        """Returns the exit code."""
        seen_alive_s = self._clock()
        while True:
            summary = read_object(self._folder / SUMMARY)  # before the last lines are read
            if self._read() or not self._run.step or is_being_written(self._folder):
                seen_alive_s = self._clock()
            has_died = not summary and self._run.step > 0 and self._clock() - seen_alive_s > DEAD_AFTER_S
            if self._run.step or summary:
                facts = read_facts(self._folder, self._results.read(self._run.starts))
                self._display.show(self._run, facts, status=_status(summary, has_died=has_died))
            elif not self._is_waiting:
                self._is_waiting = True
                self._display.say(f"{self._folder}: no step yet, waiting for the first")
            if summary:
                return self._end(summary)
            if has_died:
                self._display.say(
                    f"the run has died after step {self._run.step:,}: no process holds its folder any more, and it has"
                    f" left no {SUMMARY}; to continue, start it again with run.resume=auto"
                )
                return EXIT_DIED
            self._sleep(self._every_s)

    def _end(self, summary: dict[str, Any]) -> int:
        message = summary.get("message")
        code = int(summary.get("exit_code", 1))
        self._display.say(f"the run has ended with exit code {code}{f': {message}' if message else ''}")
        return code

    def _read(self) -> bool:
        """Takes the new lines; returns whether there were any."""
        is_new_file, lines = self._file.read()
        if is_new_file:
            self._run = WatchedRun()
        for line in lines:
            self._run.add(json.loads(line))
        return bool(lines)


class NewestResults:
    """The newest results of evaluated checkpoints. Their files are read when one of them or the run's starts change."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._known: object = None
        self._found: tuple[str, ...] = ()

    def read(self, starts: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """A text for each main figure; for a set with a damaged file, what is wrong with it. `starts`: the lines of the
        run's starts and restarts."""
        stamp = ([*starts], file_times(self._folder / EVALUATIONS))
        if stamp != self._known:
            damages: list[str] = []
            history = read_result_history(self._folder, starts_of(starts), on_damage=damages.append)
            self._known, self._found = stamp, (*brief_results(figures_by_name(history)), *damages)
        return self._found


def file_times(folder: Path) -> dict[str, int]:
    """When each file in the folders of a folder was written (ns); {} without it."""
    times = {}
    for path in folder.glob("*/*.json"):
        with suppress(OSError):  # removed by now
            times[str(path)] = path.stat().st_mtime_ns
    return times


class ScreenDisplay:
    """Draws over what it drew before."""

    every_s = SCREEN_EVERY_S

    def __init__(self, stream: TextIO):
        self._stream, self._has_colours = stream, not os.environ.get("NO_COLOR")
        self._drawn: list[int] = []
        """Columns of each line that stands there."""

    def show(self, run: WatchedRun, facts: FolderFacts, *, status: str) -> None:
        size = shutil.get_terminal_size((80, 24))
        screen = Screen(
            width=max(MIN_WIDTH, size.columns),
            height=size.lines,
            has_colours=self._has_colours,
            has_blocks=(self._stream.encoding or "").lower().startswith("utf"),
        )
        lines = draw_lines(run, facts, screen, status=status)
        rows_up = sum(max(1, -(-width // max(1, size.columns))) for width in self._drawn)  # narrower now: they wrap
        start = f"\x1b[{rows_up}A\r" if rows_up else ""
        self._stream.write(start + "\x1b[J" + "".join(f"{line}\n" for line in lines))
        self._stream.flush()
        plain = draw_lines(run, facts, Screen(width=screen.width, height=screen.height), status=status)
        self._drawn = [len(line) for line in plain]

    def say(self, text: str) -> None:
        self._drawn = []
        print(text, file=self._stream, flush=True)


class LineDisplay:
    """Prints a line for each change of membership, and for the newest step."""

    every_s = LINES_EVERY_S

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._last_step = 0
        self._shown: list[WidthChange] = []
        self._results: tuple[str, ...] = ()

    def show(self, run: WatchedRun, facts: FolderFacts, *, status: str) -> None:
        for change in run.changes:
            if change not in self._shown:
                cost = "" if change.seconds is None else f" in {change.seconds:.2f} s"
                self.say(f"step {change.step}: {change.text}{cost}")
                self._shown.append(change)
        for text in facts.results:
            if text not in self._results:
                self.say(f"evaluated {text}")
        self._results = facts.results
        if run.step != self._last_step:
            self._last_step = run.step
            self.say(describe_in_a_line(run, facts))

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def read_facts(folder: Path, results: tuple[str, ...] = ()) -> FolderFacts:
    """What config.json, summary.json, the checkpoints and the uploads say, with what their evaluations have found."""
    config, summary = read_object(folder / CONFIG), read_object(folder / SUMMARY)
    checkpoints, age_s = CheckpointDirectory(checkpoints_of_run(folder)), None
    if steps := checkpoints.steps():
        with suppress(OSError):  # removed by now
            age_s = max(0.0, time.time() - checkpoints.path_of(steps[-1]).stat().st_mtime)
    try:
        uploads = UploadHistory.of(read_metrics(folder / UPLOADS))
    except (OSError, ValueError):
        uploads = None
    return FolderFacts(
        name=folder.resolve().name,
        num_steps=config.get("run", {}).get("num_steps"),
        planned_bubble=summary.get("planned_bubble"),
        checkpoint_step=steps[-1] if steps else None,
        checkpoint_age_s=age_s,
        uploads=uploads,
        dollars_per_hour=config.get("monitor", {}).get("dollars_per_hour"),
        read_at=time.time() if not summary and is_being_written(folder) else None,
        results=results,
    )


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file; {} without one."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _status(summary: dict[str, Any], *, has_died: bool) -> str:
    if has_died:
        return "died"
    if not summary:
        return "running"
    return "finished" if summary.get("exit_code") == 0 else f"ended with code {summary.get('exit_code')}"
