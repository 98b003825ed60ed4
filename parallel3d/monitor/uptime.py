"""The account of a run: how far it is, what of its time was productive, how its starts have ended. Pure.

A fold over the lines of metrics.jsonl, so that a process which goes on with another one's run knows it, too:

    {"event": "started", "step", "time"}                          the run begins after this step, and the account anew
    {"step": 7, "step_s": 0.2}                                    a step is done
    {"event": "evaluation", "step", "seconds"}                    an evaluation is
    {"event": "diverged", "data"}                                 training has diverged; `data`: its place in the data
    {"event": "failure", "text"}                                  what it will end by
    {"event": "ended", "exit_code", "attempt_start_step", "last_step"}      a start of the run is over
    {"event": "restart", "step": 4, "lost_steps", "skips_data"}   it begins again after step 4: later steps are lost

The lines of lost steps need not be there any more. Productive is the time of the steps and
evaluations that count in the end, each once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MetricsLine = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """How one start of a run has ended."""

    exit_code: int
    attempt_start_step: int
    """The step after which it began."""
    last_step: int
    """The last step that it has done; attempt_start_step if none."""


class RunHistory:
    """What the lines so far come to."""

    def __init__(self, lines: Iterable[MetricsLine] = ()):
        self._begin(None)
        for line in lines:
            self.log(line)

    def _begin(self, started: MetricsLine | None) -> None:
        self.started = started
        """The event with which the run began."""
        self.newest: MetricsLine = {}
        """The line of the newest step."""
        self.attempt_ends: list[AttemptEnd] = []
        self.failure = ""
        """Why the newest start has failed, as far as it is known."""
        self.num_restarts = 0
        self.lost_steps = 0
        self.skipped_data: tuple[int, MetricsLine] | None = None
        """(step, place): who begins after this step, or an earlier one, reads the data from that place on."""
        self._data_position: MetricsLine | None = None
        """Where the newest divergence stood in its data."""
        self._run_start_step = self._attempt_start_step = int(started["step"]) if started else 0
        self._seconds = array("d")
        """Of the steps after the origin."""
        self._evaluation_s: dict[int, float] = {}
        """By the step that an evaluation follows."""

    @property
    def run_start_step(self) -> int:
        """The step after which the run began."""
        return self._run_start_step

    @property
    def last_step(self) -> int:
        return int(self.newest.get("step", self._attempt_start_step))

    @property
    def has_open_attempt(self) -> bool:
        """A start of the run has begun, and nothing says that it is over."""
        return self.started is not None and len(self.attempt_ends) <= self.num_restarts

    def end_attempt(self, exit_code: int) -> AttemptEnd:
        """The ending of the start that is under way, if this is its exit code."""
        return AttemptEnd(exit_code=exit_code, attempt_start_step=self._attempt_start_step, last_step=self.last_step)

    def data_position_after(self, step: int, *, skips_data: bool) -> MetricsLine | None:
        """Where whoever begins after `step` reads on in the data; None: where its checkpoint says.

        `skips_data`: it begins there because of the newest divergence, whose data shall not come again.
        """
        if skips_data and self._data_position is not None:
            return self._data_position
        return self.skipped_data[1] if self.skipped_data is not None and step <= self.skipped_data[0] else None

    def log(self, line: MetricsLine) -> None:
        match line:
            case {"event": "started"}:
                self._begin(line)
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
            case {"event": "evaluation", "step": int(step), "seconds": float(seconds)}:
                self._evaluation_s[step] = seconds
            case {"event": _}:
                return
            case {"step": int(step)}:
                self.newest = line
                self._record_step_time(step, float(line.get("step_s", 0.0)))

    def figures(self, now: float) -> dict[str, Any]:
        """Restarts, lost steps, and the share of the wall time until `now` that was productive; {} without a start."""
        if self.started is None:
            return {}
        productive_s = sum(self._seconds) + sum(self._evaluation_s.values())
        wall_s = max(now - self.started["time"], 1e-9)
        return {
            "restarts": self.num_restarts,
            "lost_steps": self.lost_steps,
            "productive_s": productive_s,
            "wall_s": wall_s,
            "uptime": productive_s / wall_s,
        }

    def _record_step_time(self, step: int, seconds: float) -> None:
        """A step that is told again has its last time; one that was never told has none."""
        index = step - self._run_start_step - 1
        self._seconds.extend([0.0] * (index + 1 - len(self._seconds)))
        if index >= 0:
            self._seconds[index] = seconds

    def _restart(self, step: int, lost_steps: int, *, skips_data: bool) -> None:
        self.num_restarts += 1
        self.lost_steps += lost_steps
        self._attempt_start_step, self.newest, self.failure = step, {}, ""
        del self._seconds[max(0, step - self._run_start_step) :]
        self._evaluation_s = {number: seconds for number, seconds in self._evaluation_s.items() if number <= step}
        if skips_data and self._data_position is not None:
            self.skipped_data = (step, self._data_position)
        self._data_position = None
