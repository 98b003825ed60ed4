"""The account of a run: its progress, its productive time, the attempts so far and how they ended. Pure.

It is computed from the lines of metrics.jsonl, so that a process which continues another's run has it too:

    {"event": "started", "step", "time"}                                 a leg of the run starts after this step
    {"step": 7, "step_s": 0.2}                                           a step is done; the first after a restart
                                                                         has its "time", too
    {"event": "evaluation", "step", "seconds"}                           an evaluation is done
    {"event": "summary", "final_loss", ...}                              the workers' figures of the whole run
    {"event": "diverged", "data"}                                        training diverged at this data position
    {"event": "failure", "text"}                                         the reason why the attempt will end
    {"event": "ended", "exit_code", "attempt_start_step", "last_step"}   an attempt ended
    {"event": "restart", "step": 4, "lost_steps", "skips_data"}          restarts after step 4; later steps are lost

A resume begins a further leg, whose lines follow those of the legs before (paid_time.py). Figures are of all legs:

    restarts, lost_steps   restarts within a leg, and the steps that they have lost; a resume is not a restart
    productive_s           seconds of the steps and evaluations in the final history, each counted once
    wall_s                 seconds of all legs, without the time between them
    uptime                 productive_s / wall_s: the goodput of docs/goodput.md where all steps are equally fast

Attempts, the step before the first one and the account of lost data are those of the newest leg: a restart depends on
them. The lines of lost steps may be missing. Lines before the first `started` don't count.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any

from parallel3d.monitor.paid_time import PaidTime

MetricsLine = dict[str, Any]

MAX_LINES_OF_NOTICES = 16_384
"""More than a run writes while a host that has a notice is still there."""
MAX_REPEATED_RECORDS = 4096
"""Newest steps and evaluations that a worker repeats to a coordinator that takes over. More than a silent one can miss:
30 s of steps of 10 ms."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """How an attempt of a run ended."""

    exit_code: int
    attempt_start_step: int
    """The step after which it started."""
    last_step: int
    """Its last completed step; attempt_start_step if none."""


@dataclass(frozen=True, kw_only=True)
class LastReported:
    """The last records in metrics.jsonl: a process that continues the run writes repeated ones no second time."""

    step: int
    """The last step; 0 before the first."""
    evaluation: int
    """The step before the last evaluation; -1 if there was none within the records that may be repeated."""
    summary: dict[str, Any] = field(default_factory=dict)
    """The figures that the workers have sent at the end of the run; {} before."""

    @staticmethod
    def of(lines_backwards: Iterable[MetricsLine]) -> LastReported:
        """Finds both from the end of metrics.jsonl, as `RunHistory` from its beginning."""
        step, evaluation, kept_until, num_records = None, -1, inf, 0
        summary: dict[str, Any] = {}
        for line in lines_backwards:
            match line:
                case {"event": "started", "step": int(at)}:
                    step = at if step is None else step
                    break
                case {"event": "restart", "step": int(at)}:
                    step, kept_until = at if step is None else step, min(kept_until, at)
                case {"event": "evaluation", "step": int(at), "seconds": int() | float()}:
                    evaluation, num_records = max(evaluation, at if at <= kept_until else -1), num_records + 1
                case {"event": "summary", "time": _, **fields} if step is None and not summary:
                    summary = {name: value for name, value in fields.items() if name != "event"}
                case {"event": _}:
                    continue
                case {"step": int(at)}:
                    step, num_records = at if step is None else step, num_records + 1
            if step is not None and (evaluation >= 0 or num_records >= MAX_REPEATED_RECORDS):
                break
        return LastReported(step=step or 0, evaluation=evaluation, summary=summary)


def recorded_preemptions(lines_backwards: Iterable[MetricsLine]) -> dict[str, set[int]]:
    """The workers of each host whose notice is among the newest `MAX_LINES_OF_NOTICES` lines of metrics.jsonl."""
    found: dict[str, set[int]] = {}
    for line in islice(lines_backwards, MAX_LINES_OF_NOTICES):
        match line:
            case {"event": "started"}:
                break
            case {"event": "preemption", "host": str(host), "ranks": list(ranks)}:
                found.setdefault(host, set()).update(ranks)
    return found


class RunHistory:
    """The account after the lines so far."""

    def __init__(self, lines: Iterable[MetricsLine] = ()):
        self.paid_time = PaidTime()
        self.history_start_step = 0
        """The step after which the first leg started."""
        self.num_restarts = 0
        """Of all legs."""
        self.lost_steps = 0
        """The same."""
        self._seconds = array("d")
        """Seconds of each step after history_start_step."""
        self._evaluation_s: dict[int, float] = {}
        """Seconds of evaluations, by the step before them."""
        self._begin_leg(None)
        for line in lines:
            self.log(line)

    def _begin_leg(self, started: MetricsLine | None) -> None:
        self.started = started
        """The event that started the newest leg."""
        self.newest: MetricsLine = {}
        """Line of the newest step."""
        self.attempt_ends: list[AttemptEnd] = []
        """Of the newest leg."""
        self.failure = ""
        """Why the newest attempt failed, as far as known."""
        self.skipped_data: tuple[int, MetricsLine] | None = None
        """(step, data position): an attempt that starts at this step or earlier reads the data from that position."""
        self._data_position: MetricsLine | None = None
        """Data position of the newest divergence."""
        self.run_start_step = self._attempt_start_step = int(started["step"]) if started else 0
        """The step after which the newest leg started."""
        self._num_leg_restarts = 0
        self._leg_evaluations: set[int] = set()
        """The steps before the evaluations of the newest leg."""

    @property
    def last_step(self) -> int:
        return int(self.newest.get("step", self._attempt_start_step))

    @property
    def last_evaluation(self) -> int:
        """The step before the last evaluation of the newest leg; -1 before the first."""
        return max(self._leg_evaluations, default=-1)

    @property
    def awaits_first_step(self) -> bool:
        """Whether the run has restarted in this leg and made no step since."""
        return bool(self._num_leg_restarts) and not self.newest

    @property
    def evaluation_times_s(self) -> list[float]:
        """Seconds of each evaluation in the final history."""
        return list(self._evaluation_s.values())

    @property
    def has_open_attempt(self) -> bool:
        """Whether an attempt has started and not ended."""
        return self.started is not None and len(self.attempt_ends) <= self._num_leg_restarts

    def end_attempt(self, exit_code: int) -> AttemptEnd:
        """The end of the current attempt with this exit code."""
        return AttemptEnd(exit_code=exit_code, attempt_start_step=self._attempt_start_step, last_step=self.last_step)

    def data_position_after(self, step: int, *, skips_data: bool) -> MetricsLine | None:
        """The data position for an attempt that starts after `step`; None means that of its checkpoint.

        `skips_data`: the attempt follows a divergence and must not repeat the data on which training diverged.
        """
        if skips_data and self._data_position is not None:
            return self._data_position
        return self.skipped_data[1] if self.skipped_data is not None and step <= self.skipped_data[0] else None

    def log(self, line: MetricsLine) -> None:
        """Adds a line to the account."""
        self.paid_time.log(line)
        match line:
            case {"event": "started", "step": int(step)}:
                if self.started is None:  # lines before it don't count
                    self.history_start_step = step
                    self._forget_steps(after=-1)
                self._forget_steps(after=step)
                self._begin_leg(line)
            case {"event": "diverged", "data": dict(data_position)}:
                self._data_position = data_position
            case {"event": "failure", "text": str(text)}:
                self.failure = text
            case {"event": "ended"}:
                self.failure = line.get("text", self.failure)
                self.attempt_ends.append(
                    AttemptEnd(**{name: line[name] for name in ("exit_code", "attempt_start_step", "last_step")})
                )
            case {"event": "restart"}:
                self._restart(line["step"], line["lost_steps"], skips_data=line["skips_data"])
            case {"event": "evaluation", "step": int(step), "seconds": int(seconds) | float(seconds)}:
                self._evaluation_s[step] = seconds
                self._leg_evaluations.add(step)
            case {"event": _}:
                return
            case {"step": int(step)}:
                self.newest = line
                self._record_step_time(step, float(line.get("step_s", 0.0)))

    def figures(self, now: float | None = None) -> dict[str, Any]:
        """The figures of all legs; {} before the start. `now` (seconds since the epoch): the newest leg goes on until
        then; None: it has ended with its last line."""
        if self.started is None:
            return {}
        productive_s = sum(self._seconds) + sum(self._evaluation_s.values())
        wall_s = max(self.paid_time.seconds(now), 1e-9)
        return {
            "restarts": self.num_restarts,
            "lost_steps": self.lost_steps,
            "productive_s": productive_s,
            "wall_s": wall_s,
            "uptime": productive_s / wall_s,
        }

    def _record_step_time(self, step: int, seconds: float) -> None:
        """Records the time of a step; the last one counts for a repeated step, none for a missing one."""
        index = step - self.history_start_step - 1
        self._seconds.extend([0.0] * (index + 1 - len(self._seconds)))
        if index >= 0:
            self._seconds[index] = seconds

    def _restart(self, step: int, lost_steps: int, *, skips_data: bool) -> None:
        self.num_restarts += 1
        self._num_leg_restarts += 1
        self.lost_steps += lost_steps
        self._attempt_start_step, self.newest, self.failure = step, {}, ""
        self._forget_steps(after=step)
        if skips_data and self._data_position is not None:
            self.skipped_data = (step, self._data_position)
        self._data_position = None

    def _forget_steps(self, *, after: int) -> None:
        """Takes back the times of steps and evaluations after the step `after`."""
        del self._seconds[max(0, after - self.history_start_step) :]
        self._evaluation_s = {step: seconds for step, seconds in self._evaluation_s.items() if step <= after}
        self._leg_evaluations = {step for step in self._leg_evaluations if step <= after}
