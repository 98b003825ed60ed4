"""Restart policy: whether a run that has ended is restarted, from which step, and after how long. Pure.

    end of a start                   action
    success, or a stop               stop
    an invalid configuration;        stop: it would fail again
      replicas that differ;
      the coordinator lost;
      hosts taken away
    too many workers lost            restart from the newest checkpoint
    an exception in a worker         restart from the newest checkpoint; stop if the start completed no step, or if it
                                     failed at the same step before: then it is a defect
    training has diverged            restart from the newest checkpoint; if it diverges again before a new checkpoint,
                                     from one older than the diverged start's

The wait doubles with each restart after a start that did not get beyond all earlier ones. Without a checkpoint the run
restarts from its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parallel3d.errors import (
    EXIT_COORDINATOR_LOST,
    EXIT_DIVERGED,
    EXIT_PREEMPTED,
    EXIT_REPLICAS_DIFFER,
    EXIT_WORKER_LOST,
    UserError,
)
from parallel3d.monitor.uptime import AttemptEnd

Json = dict[str, Any]

START_KEY = "start"
"""Key of the start instruction in the key-value store."""
FIRST_SIGNAL_CODE = 128
FINAL_EXIT_CODES = (0, UserError.exit_code, EXIT_COORDINATOR_LOST, EXIT_REPLICAS_DIFFER, EXIT_PREEMPTED)
"""Exit codes after which the run is not restarted."""


@dataclass(frozen=True, kw_only=True)
class StartInstruction:
    """Where the workers of one start begin, the same for all of them."""

    attempt: int = 0
    """How often the run has been restarted."""
    checkpoint: str | None = None
    """The checkpoint's directory; None: initialise from the seed."""
    data: Json | None = None
    """Position in the data (trainer/resume.py); None: the checkpoint's."""

    def to_json(self) -> Json:
        return {"attempt": self.attempt, "checkpoint": self.checkpoint, "data": self.data}

    @staticmethod
    def from_json(data: Json) -> StartInstruction:
        return StartInstruction(**data)


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """The limits in the configuration's section `restart`."""

    max_restarts: int
    backoff_s: float
    max_backoff_s: float


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Restart after step `step`, in `wait_s` seconds."""

    step: int
    wait_s: float


@dataclass(frozen=True, kw_only=True)
class Stop:
    """No restart; `why` not, or "" if that is obvious."""

    why: str = ""


def decide(
    policy: RestartPolicy, attempt_ends: Sequence[AttemptEnd], checkpoints: Sequence[int], *, run_start_step: int
) -> Restart | Stop:
    """Decides after the last of `attempt_ends`, the ends of all starts of the run so far.

    `checkpoints` are the steps of the existing ones, `run_start_step` is the step at which the run began.
    """
    attempt_end = attempt_ends[-1]
    if attempt_end.exit_code in FINAL_EXIT_CODES or attempt_end.exit_code > FIRST_SIGNAL_CODE:
        return Stop()
    if policy.max_restarts == 0:
        return Stop(why=_by_hand(checkpoints))
    if len(attempt_ends) > policy.max_restarts:
        times = "once" if policy.max_restarts == 1 else f"{policy.max_restarts} times"
        return Stop(why=f"restarted {times}, as often as restart.max_restarts allows; {_by_hand(checkpoints)}")
    if attempt_end.exit_code not in (EXIT_WORKER_LOST, EXIT_DIVERGED) and (why := _is_defect(attempt_ends)):
        return Stop(why=why)
    step = choose_step(attempt_ends, checkpoints, run_start_step=run_start_step)
    if step is None:
        return Stop(
            why=f"no checkpoint is left from before step {attempt_end.attempt_start_step}, where this start began"
        )
    return Restart(step=step, wait_s=wait_before(policy, attempt_ends))


def choose_step(attempt_ends: Sequence[AttemptEnd], checkpoints: Sequence[int], *, run_start_step: int) -> int | None:
    """Returns the step to restart after; None: a divergence came back, and no older checkpoint exists."""
    attempt_end = attempt_ends[-1]
    newest = max(checkpoints, default=None)
    before = [other.last_step for other in attempt_ends[:-1] if other.exit_code == EXIT_DIVERGED]
    came_back = attempt_end.exit_code == EXIT_DIVERGED and bool(before) and (newest is None or newest <= max(before))
    if came_back:
        return max((step for step in checkpoints if step < attempt_end.attempt_start_step), default=None)
    return run_start_step if newest is None else newest


def wait_before(policy: RestartPolicy, attempt_ends: Sequence[AttemptEnd]) -> float:
    """Returns the seconds from the last end to the restart."""
    wait_s = policy.backoff_s
    for number in range(len(attempt_ends) - 1, 0, -1):
        if attempt_ends[number].last_step > max(attempt_end.last_step for attempt_end in attempt_ends[:number]):
            break
        wait_s *= 2
    return min(wait_s, policy.max_backoff_s)


def _is_defect(attempt_ends: Sequence[AttemptEnd]) -> str:
    """Returns why an exception would only repeat, or ""."""
    attempt_end = attempt_ends[-1]
    if attempt_end.last_step == attempt_end.attempt_start_step:
        return "not restarted: it failed before completing a step"
    others = [other for other in attempt_ends[:-1] if other.exit_code == attempt_end.exit_code]
    if any(other.last_step == attempt_end.last_step for other in others):
        return f"not restarted again: it has failed at the same step before, after step {attempt_end.last_step}"
    return ""


def _by_hand(checkpoints: Sequence[int]) -> str:
    if not checkpoints:
        return "no checkpoint exists to resume from (checkpoint.every)"
    return f"run.resume=auto resumes from the checkpoint of step {max(checkpoints)}"
