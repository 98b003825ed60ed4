"""Begins a run, and begins it again when it can't go on in place: from which checkpoint, with what told to whom.

Lives in the coordinator's process. There every byte of the chosen checkpoint is read before any worker begins; the
workers get the verdict through the coordinator (`order`). What is decided is decided by elastic/restart.py, from the
account of the run, which is a fold over metrics.jsonl.

    started plainly     the process that has forked the workers forks a full set again
    under a launcher    that starts every process again (torchrun --max-restarts): a new supervisor finds the folder of
                        the run that it belongs to, and goes on with it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.catalogue import Catalogue, Found, verify_whole
from parallel3d.elastic.restart import (
    START_KEY,
    Again,
    NoMore,
    RestartPolicy,
    StartOrder,
    choose_step,
    decide,
)
from parallel3d.elastic.verdict import Outcome
from parallel3d.errors import EXIT_DIVERGED, EXIT_WORKER_LOST, CheckpointError, UserError
from parallel3d.monitor.account import Account, Ending
from parallel3d.monitor.run_folder import METRICS, ContinuedFolder, RunFolder, read_metrics
from parallel3d.monitor.sinks import RunReport

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Who has started this process."""

    by_launcher: bool = False
    """Another launcher, which also restarts it."""
    run_id: str = ""
    """The launcher's name of the run, the same after a restart."""
    attempt: int = 0
    """How often the launcher has restarted it."""


class _Stopped(Exception):
    """Somebody does not want to wait until a checkpoint has been read."""


class Supervisor:
    """The starts of one run. `open_folder` is given the step up to which the folder's lines are this run's own;
    `prepare`, called before it, whether the run goes on from a checkpoint, and returns what a person shall know."""

    def __init__(
        self,
        *,
        directory: Path,
        open_folder: Callable[[int], RunFolder],
        prepare: Callable[[bool], Sequence[str]] = lambda goes_on: (),
        make_report: Callable[[RunFolder], RunReport],
        catalogue: Catalogue,
        resume: str,
        policy: RestartPolicy,
        skip_diverging_data: bool,
        launch: Launch,
    ):
        self._directory = directory
        self._open_folder = open_folder
        self._prepare = prepare
        self._make_report = make_report
        self._catalogue = catalogue
        self._resume = resume
        self._policy = policy
        self._skip_diverging_data = skip_diverging_data
        self._launch = launch
        self._origin: str | None = None
        """The checkpoint with which the run began."""
        self._order = StartOrder()

    @property
    def values(self) -> Mapping[str, bytes]:
        """What the coordinator of the next start tells its workers."""
        return {START_KEY: json.dumps(self._order.to_json()).encode()}

    def begin(self) -> RunReport:
        """The report of the run, once it is chosen where it begins; raises UserError."""
        if self._launch.attempt and (started := self._started_before()):
            return self._begin_after_launcher(started)
        start = self._choose_start()
        notices = self._prepare(start.path is not None)
        history_to = self._history_of(start)
        report = self._make_report(self._open_folder(history_to))
        self._origin = str(start.path) if start.path else None
        self._order = StartOrder(checkpoint=self._origin)
        step = start.index.step if start.index else 0
        report.publish({"event": "started", "step": step, "path": self._origin, "run_id": self._launch.run_id})
        _tell_damaged(report, start.damaged)
        self._set_aside(report, after=history_to)
        if start.index is not None:
            report.publish({"event": "resumed_from", "step": step, "path": self._origin})
        elif self._resume == "auto":
            report.publish({"kind": "notice", "text": "no checkpoint to go on from: from the start"})
        for text in notices:
            report.publish({"kind": "notice", "text": text})
        if self._launch.by_launcher and self._policy.max_restarts:
            text = "restart.max_restarts is for runs that are started plainly: your launcher restarts this one, or not"
            report.publish({"kind": "notice", "text": text})
        return report

    def reopen(self) -> RunReport:
        """The report of a run that this process takes over while it goes on."""
        return self._make_report(ContinuedFolder(self._directory))

    def follow(self, report: RunReport, outcome: Outcome, stopped: Callable[[], bool]) -> Again | NoMore:
        """What comes after a start that has ended; the report is paused. If Again, `values` are the next start's.

        `stopped`: whether somebody has asked for a stop, which also ends the reading of a large checkpoint.
        """
        ending = report.account.end(outcome.exit_code)
        _tell_ending(report, ending, outcome.message)
        if stopped() or self._launch.by_launcher:
            return NoMore()
        endings = [*report.account.endings, ending]

        def decide_now(steps: Sequence[int]) -> Again | NoMore:
            return decide(self._policy, endings, steps, origin=report.account.origin)

        def check() -> None:
            if stopped():
                raise _Stopped

        try:
            decision = self._choose(report, decide_now, check)
        except _Stopped:
            return NoMore(why="stopped before it began again")
        if isinstance(decision, Again):
            try:
                self._set_aside(report, after=decision.step)
            except UserError as error:
                return NoMore(why=str(error))
            self._begin_again(report, ending, decision, why=outcome.message, number=len(endings))
        return decision

    # --- the first start ------------------------------------------------------------------------------------------

    def _choose_start(self) -> Found:
        """Raises CheckpointError when a checkpoint that was asked for by its path is damaged."""
        if self._resume == "never":
            return Found(path=None, index=None, damaged=())
        if self._resume == "auto":
            return self._catalogue.find_newest_good()
        path = Path(self._resume).resolve()
        return Found(path=path, index=verify_whole(path), damaged=())

    def _history_of(self, start: Found) -> int:
        """The step up to which the run's folder holds the very run that goes on; 0: another run's."""
        is_own = start.path is not None and start.path.parent == self._catalogue.directory.resolve()
        return start.index.step if start.index is not None and (is_own or self._resume == "auto") else 0

    # --- further starts -------------------------------------------------------------------------------------------

    def _started_before(self) -> Account | None:
        """The account of the run that the launcher has restarted; None when it had not come so far."""
        try:
            account = Account(read_metrics(self._directory / METRICS))
        except OSError:
            return None
        started = account.started
        return account if started is not None and started.get("run_id") == self._launch.run_id else None

    def _begin_after_launcher(self, account: Account) -> RunReport:
        report = self.reopen()
        assert account.started is not None
        self._origin = account.started["path"]
        endings, why = list(account.endings), account.failure
        if account.is_open:
            endings.append(account.end(EXIT_WORKER_LOST))
            _tell_ending(report, endings[-1], why)

        def decide_step(steps: Sequence[int]) -> Again | NoMore:
            step = choose_step(endings, steps, origin=account.origin)
            return NoMore() if step is None else Again(step=step, wait_s=0.0)

        decision = self._choose(report, decide_step, check=lambda: None)
        if isinstance(decision, NoMore):
            raise UserError("training has diverged again, and no older checkpoint is left to go back to")
        self._set_aside(report, after=decision.step)
        self._begin_again(report, endings[-1], decision, why=why, number=self._launch.attempt)
        return report

    def _choose(
        self, report: RunReport, decide_on: Callable[[Sequence[int]], Again | NoMore], check: Callable[[], None]
    ) -> Again | NoMore:
        """The decision on the checkpoints that are good; damaged ones are told and passed over."""
        steps = self._catalogue.steps()
        while True:
            decision = decide_on(steps)
            if isinstance(decision, NoMore) or decision.step not in steps:
                return decision
            try:
                verify_whole(self._catalogue.path_of(decision.step), check)
                return decision
            except CheckpointError as error:
                _tell_damaged(report, [str(error)])
                steps.remove(decision.step)

    def _begin_again(self, report: RunReport, ending: Ending, again: Again, *, why: str, number: int) -> None:
        """Tells of the restart, and orders the next start."""
        step, path = again.step, self._catalogue.path_of(again.step)
        checkpoint = str(path) if step in self._catalogue.steps() else self._origin
        skips_data = ending.exit_code == EXIT_DIVERGED and self._skip_diverging_data
        place = report.account.place_after(step, skips_data=skips_data)
        lost_steps = max(0, ending.last_step - step)
        self._order = StartOrder(attempt=number, checkpoint=checkpoint, data=place)
        text = [
            f"restart {number}" + ("" if self._launch.by_launcher else f" of {self._policy.max_restarts}"),
            f" in {again.wait_s:g} s" if again.wait_s else "",
            f" from the checkpoint of step {step}" if checkpoint else " from the start",
            f", {lost_steps} step{'s' * (lost_steps != 1)} lost",
            _what_is_left_out(step + 1, ending.last_step, is_new=skips_data) if place else "",
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
                "skips_data": skips_data and place is not None,
                "wait_s": again.wait_s,
                "why": why,
            }
        )

    def _set_aside(self, report: RunReport, *, after: int) -> None:
        """Moves checkpoints of later steps away; raises UserError where that can't be."""
        try:
            aside = self._catalogue.set_aside(after=after)
            num_bytes = self._catalogue.set_aside_bytes()
        except OSError as error:
            raise UserError(f"can't write into {self._catalogue.directory} ({error.strerror})") from None
        if aside is not None:
            text = f"checkpoints that this run does not go on from are now in {aside}"
            report.publish({"kind": "notice", "text": text})
        if num_bytes:
            text = (
                f"{num_bytes / 1e6:,.1f} MB of such checkpoints are kept until you remove {self._catalogue.directory}"
            )
            report.publish({"kind": "notice", "text": f"{text}/previous-*"})


def _tell_ending(report: RunReport, ending: Ending, text: str) -> None:
    report.publish(
        {
            "event": "ended",
            "exit_code": ending.exit_code,
            "began_at": ending.began_at,
            "last_step": ending.last_step,
            "text": text,
        }
    )


def _what_is_left_out(first: int, last: int, *, is_new: bool) -> str:
    """`first` to `last` are the steps that have just diverged, if any have (`is_new`); else others had before."""
    if not is_new:
        return ", the data that led into the divergence is left out again"
    which = f"step {last}" if first == last else f"steps {first} to {last}"
    return f", the data of {which} is left out"


def _in_one_line(message: str) -> str:
    """Without the places of logs."""
    return "; ".join(line for line in message.splitlines() if not line.startswith(" "))


def _tell_damaged(report: RunReport, damaged: Sequence[str]) -> None:
    for text in damaged:
        report.publish({"kind": "notice", "text": f"passed over: {text}"})
