"""Starts a run, and restarts it when it can't go on in place: chooses the checkpoint and instructs the workers.

Runs in the coordinator's process. It reads every byte of the chosen checkpoint before any worker starts; workers get
the start instruction from the coordinator's key-value store. The decisions are made by protocol/restart_policy.py, from
the run's history in metrics.jsonl.

    no launcher         the guardian forks a full set of workers again
    under a launcher    which restarts every process (torchrun --max-restarts): a new restart manager finds the run's
                        folder and goes on with it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.directory import CheckpointDirectory, NewestCheckpoint, verify_resumable
from parallel3d.elastic.coordinator.run_status import RunOutcome
from parallel3d.elastic.protocol.restart_policy import (
    START_KEY,
    Restart,
    RestartPolicy,
    StartInstruction,
    Stop,
    choose_step,
    decide,
)
from parallel3d.errors import EXIT_DIVERGED, EXIT_WORKER_LOST, CheckpointError, UserError
from parallel3d.monitor.run_folder import METRICS, ContinuedRunFolder, RunFolder, read_metrics
from parallel3d.monitor.sinks import RunReporter
from parallel3d.monitor.uptime import AttemptEnd, RunHistory

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LauncherInfo:
    """The launcher of this process, if any."""

    by_launcher: bool = False
    """True under a launcher, which also does the restarts."""
    run_id: str = ""
    """The launcher's name of the run, the same after a restart."""
    attempt: int = 0
    """How often the launcher has restarted it."""


class _Stopped(Exception):
    """A stop was requested while a checkpoint was being read."""


class RestartManager:
    """Manages the starts of one run.

    `open_folder(step)` opens the run folder, whose lines up to `step` are this run's own. `prepare(is_resuming)` is
    called before it and returns notices.
    """

    def __init__(
        self,
        *,
        directory: Path,
        open_folder: Callable[[int], RunFolder],
        prepare: Callable[[bool], Sequence[str]] = lambda is_resuming: (),
        make_report: Callable[[RunFolder], RunReporter],
        checkpoint_dir: CheckpointDirectory,
        resume: str,
        policy: RestartPolicy,
        skip_diverging_data: bool,
        launcher: LauncherInfo,
    ):
        self._directory = directory
        self._open_folder = open_folder
        self._prepare = prepare
        self._make_report = make_report
        self._checkpoint_dir = checkpoint_dir
        self._resume = resume
        self._policy = policy
        self._skip_diverging_data = skip_diverging_data
        self._launcher = launcher
        self._start_instruction = StartInstruction()

    @property
    def values(self) -> Mapping[str, bytes]:
        """Initial contents of the key-value store: the start instruction."""
        return {START_KEY: json.dumps(self._start_instruction.to_json()).encode()}

    def begin(self) -> RunReporter:
        """Chooses where the run begins; returns its reporter. Raises UserError."""
        if self._launcher.attempt and (started := self._started_before()):
            return self._begin_after_launcher(started)
        start = self._choose_start()
        notices = self._prepare(start.path is not None)
        history_until_step = self._history_of(start)
        report = self._make_report(self._open_folder(history_until_step))
        origin = str(start.path) if start.path else None
        self._start_instruction = StartInstruction(checkpoint=origin)
        step = start.index.step if start.index else 0
        report.publish({"event": "started", "step": step, "path": origin, "run_id": self._launcher.run_id})
        _publish_damaged(report, start.damaged)
        self._archive_later(report, after=history_until_step)
        if start.index is not None:
            report.publish({"event": "resumed_from", "step": step, "path": origin})
        elif self._resume == "auto":
            text = "no checkpoint to resume from: starting from step 0"
            if (archived := self._checkpoint_dir.newest_archived()) is not None:
                text += f"; an earlier run's are kept, and run.resume={archived} continues that"
            report.publish({"kind": "notice", "text": text})
        for text in notices:
            report.publish({"kind": "notice", "text": text})
        if self._launcher.by_launcher and self._policy.max_restarts:
            text = "restart.max_restarts is ignored: restarts are up to the launcher that started this process"
            report.publish({"kind": "notice", "text": text})
        return report

    def reopen(self) -> RunReporter:
        """Returns the reporter of a run that this process takes over while it is running."""
        return self._make_report(ContinuedRunFolder(self._directory))

    def next_action(self, report: RunReporter, outcome: RunOutcome, stopped: Callable[[], bool]) -> Restart | Stop:
        """Decides what follows a start that has ended. After a Restart, `values` are the next start's.

        `report` is paused. `stopped()` is True once a stop is requested, which also ends reading a large checkpoint.
        """
        attempt_end = report.run_history.end_attempt(outcome.exit_code)
        _publish_ending(report, attempt_end, outcome.message)
        if stopped() or self._launcher.by_launcher:
            return Stop()
        attempt_ends = [*report.run_history.attempt_ends, attempt_end]

        def decide_now(steps: Sequence[int]) -> Restart | Stop:
            return decide(self._policy, attempt_ends, steps, run_start_step=report.run_history.run_start_step)

        def check() -> None:
            if stopped():
                raise _Stopped

        try:
            decision = self._choose(report, decide_now, check)
        except _Stopped:
            return Stop(why="stopped before the restart")
        if isinstance(decision, Restart):
            try:
                self._archive_later(report, after=decision.step)
            except UserError as error:
                return Stop(why=str(error))
            self._restart(report, attempt_end, decision, why=outcome.message, number=len(attempt_ends))
        return decision

    # --- the first start ------------------------------------------------------------------------------------------

    def _choose_start(self) -> NewestCheckpoint:
        """Chooses the checkpoint to start from; raises CheckpointError if one given by its path is damaged."""
        if self._resume == "never":
            return NewestCheckpoint(path=None, index=None, damaged=())
        if self._resume == "auto":
            return self._checkpoint_dir.find_newest_valid()
        path = self._checkpoint_dir.find_named(self._resume)
        return NewestCheckpoint(path=path, index=verify_resumable(path), damaged=())

    def _history_of(self, start: NewestCheckpoint) -> int:
        """Returns the step up to which the run's folder holds the history of this run; 0: another run's."""
        is_own = start.path is not None and start.path.parent == self._checkpoint_dir.directory.resolve()
        return start.index.step if start.index is not None and (is_own or self._resume == "auto") else 0

    # --- further starts -------------------------------------------------------------------------------------------

    def _started_before(self) -> RunHistory | None:
        """Returns the history of the run that the launcher has restarted; None if it had not started."""
        try:
            run_history = RunHistory(read_metrics(self._directory / METRICS))
        except OSError:
            return None
        started = run_history.started
        return run_history if started is not None and started.get("run_id") == self._launcher.run_id else None

    def _begin_after_launcher(self, run_history: RunHistory) -> RunReporter:
        report = self.reopen()
        attempt_ends, why = list(run_history.attempt_ends), run_history.failure
        if run_history.has_open_attempt:
            attempt_ends.append(run_history.end_attempt(EXIT_WORKER_LOST))
            _publish_ending(report, attempt_ends[-1], why)

        def decide_step(steps: Sequence[int]) -> Restart | Stop:
            step = choose_step(attempt_ends, steps, run_start_step=run_history.run_start_step)
            return Stop() if step is None else Restart(step=step, wait_s=0.0)

        decision = self._choose(report, decide_step, check=lambda: None)
        if isinstance(decision, Stop):
            raise UserError("training has diverged again, and no older checkpoint is left to go back to")
        self._archive_later(report, after=decision.step)
        self._restart(report, attempt_ends[-1], decision, why=why, number=self._launcher.attempt)
        return report

    def _choose(
        self, report: RunReporter, decide_on: Callable[[Sequence[int]], Restart | Stop], check: Callable[[], None]
    ) -> Restart | Stop:
        """Decides on the valid checkpoints; damaged ones are reported and skipped."""
        try:
            steps = self._checkpoint_dir.steps()
        except CheckpointError as error:  # a finished run needs none; a restart meets it again when it archives
            _publish_damaged(report, [str(error)])
            steps = []
        while True:
            decision = decide_on(steps)
            if isinstance(decision, Stop) or decision.step not in steps:
                return decision
            try:
                verify_resumable(self._checkpoint_dir.path_of(decision.step), check)
                return decision
            except CheckpointError as error:
                _publish_damaged(report, [str(error)])
                steps.remove(decision.step)

    def _restart(
        self, report: RunReporter, attempt_end: AttemptEnd, restart: Restart, *, why: str, number: int
    ) -> None:
        """Publishes the restart and sets the instruction of the next start."""
        step, path = restart.step, self._checkpoint_dir.path_of(restart.step)
        origin = (report.run_history.started or {}).get("path")  # the checkpoint that the run began with
        checkpoint = str(path) if step in self._checkpoint_dir.steps() else origin
        skips_data = attempt_end.exit_code == EXIT_DIVERGED and self._skip_diverging_data
        data_position = report.run_history.data_position_after(step, skips_data=skips_data)
        lost_steps = max(0, attempt_end.last_step - step)
        self._start_instruction = StartInstruction(attempt=number, checkpoint=checkpoint, data=data_position)
        text = [
            f"restart {number}" + ("" if self._launcher.by_launcher else f" of {self._policy.max_restarts}"),
            f" in {restart.wait_s:g} s" if restart.wait_s else "",
            f" from the checkpoint of step {step}" if checkpoint else " from the start",
            f", {lost_steps} {'step' if lost_steps == 1 else 'steps'} lost",
            _describe_skipped_data(step + 1, attempt_end.last_step, is_new=skips_data) if data_position else "",
            f": {_in_one_line(why)}" if why else "",
        ]
        report.publish(
            {
                "kind": "restart",
                "text": "".join(text),
                "number": number,
                "step": step,
                "path": checkpoint,
                "lost_steps": lost_steps,
                "skips_data": skips_data and data_position is not None,
                "wait_s": restart.wait_s,
                "why": why,
            }
        )

    def _archive_later(self, report: RunReporter, *, after: int) -> None:
        """Moves checkpoints of later steps to an archive; raises UserError if that fails."""
        try:
            archive = self._checkpoint_dir.archive_later(after=after)
            num_bytes = self._checkpoint_dir.archived_bytes()
        except OSError as error:
            raise UserError(f"can't write into {self._checkpoint_dir.directory} ({error.strerror})") from None
        if archive is not None:
            text = f"moved checkpoints that this run does not continue to {archive}"
            report.publish({"kind": "notice", "text": text})
        if num_bytes:
            pattern = self._checkpoint_dir.directory / "previous-*"
            text = f"archived checkpoints take {num_bytes / 1e6:,.1f} MB; remove {pattern} to free them"
            report.publish({"kind": "notice", "text": text})


def _publish_ending(report: RunReporter, attempt_end: AttemptEnd, text: str) -> None:
    report.publish(
        {
            "event": "ended",
            "exit_code": attempt_end.exit_code,
            "attempt_start_step": attempt_end.attempt_start_step,
            "last_step": attempt_end.last_step,
            "text": text,
        }
    )


def _describe_skipped_data(first: int, last: int, *, is_new: bool) -> str:
    """Describes skipped data: that of the diverged steps `first` to `last` (`is_new`), or of an earlier divergence."""
    if not is_new:
        return ", the data before the divergence is skipped again"
    which = f"step {last}" if first == last else f"steps {first} to {last}"
    return f", the data of {which} is skipped"


def _in_one_line(message: str) -> str:
    """Joins the lines, except those that name logs."""
    return "; ".join(line for line in message.splitlines() if not line.startswith(" "))


def _publish_damaged(report: RunReporter, damaged: Sequence[str]) -> None:
    for text in damaged:
        report.publish({"kind": "notice", "text": f"checkpoint skipped: {text}"})
