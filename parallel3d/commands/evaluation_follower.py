"""Follows a run and evaluates its checkpoints: `parallel3d evaluate RUN --follow`, and beside a run that asks for it.

It decides which checkpoint is due; each evaluation is a process of its own, which computes while cores are idle and is
the first that the system ends where memory runs out. A checkpoint is held by hard links meanwhile.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.checkpoint.hold import hold_checkpoint
from parallel3d.child_process import command_line
from parallel3d.commands.evaluate_options import default_name, parse_sets, settings_of
from parallel3d.commands.followed_run import FollowedRun, RunByHand, RunOfParent
from parallel3d.config.sections.evaluation import SET_NAME
from parallel3d.errors import CheckpointError, UserError
from parallel3d.evaluation.result_figures import main_figures
from parallel3d.evaluation.results import format_table
from parallel3d.evaluation.saved_results import (
    KnownSteps,
    Report,
    ResultFolder,
    SavedStep,
    find_saved,
    is_left_behind,
    plan_evaluations_of,
)
from parallel3d.models.initial_weights import checkpoints_of_run
from parallel3d.monitor.run_folder import METRICS

POLL_S = 1.0
LOG, LOCK, WRITTEN, HELD = "log.txt", ".lock", ".result.json", ".evaluating-"
EXIT_INCOMPLETE = 1


def follow(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Follows the run until it has ended, or the process that started this one is gone; returns the exit code."""
    folder: Path = options.source
    if options.sets is not None:
        run: FollowedRun = RunOfParent(folder, since_s=options.since, end_wait_s=options.end_wait)
        settings = {name: settings_of(each) for name, each in parse_sets(folder, options.sets).items()}
        commands = {name: [str(folder), *shlex.split(text)] for name, text in options.sets.items()}
    else:
        name = options.name or default_name(options)
        check_by_hand(folder, name)
        run, settings, commands = RunByHand(folder), {name: settings_of(options)}, {name: [*arguments]}
    with ExitStack() as locks:
        for name in commands:
            ResultFolder(folder, name).prepare(settings[name])
            locks.enter_context(lock_of(ResultFolder(folder, name)))
        lower_priority()
        directory = options.checkpoints or checkpoints_of_run(folder)
        return EvaluationFollower(
            run,
            CheckpointDirectory(directory),
            [FollowedSet(folder, name, command, threads=options.threads or 1) for name, command in commands.items()],
            every_tokens=options.every_tokens or 1,
        ).run()


def check_by_hand(folder: Path, name: str) -> None:
    """Raises UserError without a run, or for a name that does not fit a folder."""
    if not isinstance(folder, Path) or not (folder / METRICS).is_file():
        raise UserError(f"--follow: {folder} is not the folder of a run here: it has no {METRICS}")
    if not SET_NAME.fullmatch(name):
        raise UserError(f"--name {name}: is not a name for a folder; use letters, digits, - and _")


def lock_of(results: ResultFolder) -> Any:
    """An open file that holds the set; raises UserError if another process has it."""
    file = (results.path / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"another process evaluates into {results.path}: choose another --name, or wait") from None
    return file


def lower_priority() -> None:
    """Has this process and its children compute only while a core is idle, and end first where memory runs out."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.nice(19)  # elsewhere than on Linux
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


class FollowedSet:
    """One set of texts or tasks: its results, and what its last evaluation came to."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[str], *, threads: int):
        self.results, self.name = ResultFolder(folder, name), name
        self._arguments, self._threads = [*arguments], threads
        self.failed: set[SavedStep] = set()
        self.problem = ""
        """Why the last evaluation has failed."""
        self.num_done = 0

    def start(self, checkpoint: Path) -> subprocess.Popen[bytes]:
        """The process that evaluates a checkpoint into the file WRITTEN."""
        path = self.results.path
        extra = ["--at", str(checkpoint), "--out", str(path / WRITTEN), "--threads", str(self._threads)]
        with (path / LOG).open("wb") as log:
            return subprocess.Popen(
                command_line("evaluate", *self._arguments, *extra),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": str(self._threads)},
            )

    def describe_failure(self, code: int) -> str:
        lines = (self.results.path / LOG).read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"{last[:300] or 'its process has said nothing'} (exit code {code}, {self.results.path / LOG})"


class EvaluationFollower:
    """Evaluates each checkpoint that is due on each set, one after the other."""

    def __init__(
        self, run: FollowedRun, directory: CheckpointDirectory, sets: Sequence[FollowedSet], *, every_tokens: int
    ):
        self._run, self._directory, self._sets, self._every_tokens = run, directory, sets, every_tokens
        self._known: KnownSteps = {}

    def run(self) -> int:
        while True:
            is_over = self._run.is_over()  # before the last look at what is there
            if is_over and self._run.is_out_of_time():
                return self._end()
            if (due := self._next_due(is_over)) is not None:
                self._evaluate(*due)
            elif is_over:
                return self._end()
            else:
                self._run.wait(POLL_S)

    def _next_due(self, is_over: bool) -> tuple[SavedStep, list[FollowedSet]] | None:
        """The next checkpoint, the oldest one, which is the next to be removed; and the sets that lack it."""
        starts = self._run.starts()
        if not self._run.has_begun:
            return None
        self._known = find_saved(self._directory, self._known)
        saved = [each for _, each in self._known.values() if not is_left_behind(each, starts)]
        planned = [
            plan_evaluations_of(
                saved,
                every_tokens=self._every_tokens,
                done=each.results.reports(starts),
                failed=each.failed,
                is_last_due=is_over and self._run.has_succeeded,
            )
            for each in self._sets
        ]
        oldest = min((step for steps in planned for step in steps), key=lambda step: step.tokens, default=None)
        if oldest is None:
            return None
        return oldest, [each for each, steps in zip(self._sets, planned) if oldest in steps]

    def _evaluate(self, saved: SavedStep, tasks: Sequence[FollowedSet]) -> None:
        path, suffix = self._directory.path_of(saved.step), HELD + self._sets[0].name
        try:
            with hold_checkpoint(path, suffix) as (checkpoint, _):
                if checkpoint is None:  # removed before it could be held: a later one takes its place
                    return
                for task in tasks:
                    if (code := self._wait(task.start(checkpoint))) is None:
                        return
                    self._record(task, saved, code)
        except CheckpointError as error:  # a damaged index
            for task in tasks:
                self._fail(task, saved, str(error))

    def _record(self, task: FollowedSet, saved: SavedStep, code: int) -> None:
        if code == 0:
            report = task.results.publish(task.results.path / WRITTEN, saved.step)
            if task.problem:
                self._run.say(f"{task.name}: step {saved.step} could be evaluated again")
            task.problem, task.num_done = "", task.num_done + 1
            self._run.show(describe(task.name, saved, report))
        elif saved in [each for _, each in find_saved(self._directory, self._known).values()]:
            self._fail(task, saved, task.describe_failure(code))
        # else it was removed meanwhile, on a disk without hard links

    def _fail(self, task: FollowedSet, saved: SavedStep, problem: str) -> None:
        task.failed.add(saved)
        if not task.problem:
            self._run.say(f"{task.name}: step {saved.step} could not be evaluated: {problem}")
        task.problem = problem

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """The process's exit code; None if it was ended because the time is over."""
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(POLL_S)
                if self._run.is_over() and self._run.is_out_of_time():
                    return None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()  # bounded: it was killed

    def _end(self) -> int:
        due, num_done = self._next_due(True), sum(task.num_done for task in self._sets)
        failed = sum(len(task.failed) for task in self._sets)
        if due is not None and self._run.has_succeeded:
            names = ", ".join(task.name for task in due[1])
            self._run.say(f"{names}: the time is over, step {due[0].step} is not done; --follow does the rest")
        elif num_done and not failed:
            self._run.say(f"{num_done} done; parallel3d evaluate {self._run.folder} --history shows them")
        return EXIT_INCOMPLETE if failed or due is not None else 0


def describe(name: str, saved: SavedStep, report: Report) -> str:
    """A result as text."""
    figures: Mapping[str, Any] = main_figures(report["results"])
    return format_table({f"{name}, step {saved.step:,}": {"tokens trained": saved.tokens, **figures}})
