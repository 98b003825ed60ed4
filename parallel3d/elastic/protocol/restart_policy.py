"""Whether a run that has ended begins again, from which step, and after how long. Pure.

    how it has ended               what follows
    well, or by a stop             the end
    a mistake in what it was       the end: it would be there again
      given; copies that differ;
      the coordinator lost
    too many workers lost          again, from the newest checkpoint
    an exception in a worker       again, from the newest checkpoint; the end when none of its steps was done, or when
                                   it has come to the same step before: then it is a defect
    training has diverged          again, from the newest checkpoint; from one older than where the diverged start had
                                   begun as long as none is there from beyond the divergence before

The wait doubles with each restart that follows a start which did not get beyond all earlier ones. Without a checkpoint
it begins where the run did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parallel3d.errors import (
    EXIT_COORDINATOR_LOST,
    EXIT_DIVERGED,
    EXIT_REPLICAS_DIFFER,
    EXIT_WORKER_LOST,
    UserError,
)
from parallel3d.monitor.uptime import AttemptEnd

Json = dict[str, Any]

START_KEY = "start"
"""Under which the coordinator tells the workers from where they begin."""
FIRST_SIGNAL_CODE = 128
FINAL_EXIT_CODES = (0, UserError.exit_code, EXIT_COORDINATOR_LOST, EXIT_REPLICAS_DIFFER)
"""Exit codes after which nothing begins again."""


@dataclass(frozen=True, kw_only=True)
class StartInstruction:
    """From where the workers of one start begin, the same for all of them."""

    attempt: int = 0
    """How often the run has been restarted."""
    checkpoint: str | None = None
    """The folder of the checkpoint; None: from the seed."""
    data: Json | None = None
    """Where to read on in the data (trainer/resume.py); None: where the checkpoint says."""

    def to_json(self) -> Json:
        return {"attempt": self.attempt, "checkpoint": self.checkpoint, "data": self.data}

    @staticmethod
    def from_json(data: Json) -> StartInstruction:
        return StartInstruction(**data)


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """The configuration's section `restart`, as far as it decides."""

    max_restarts: int
    backoff_s: float
    max_backoff_s: float


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The run begins again after step `step`, in `wait_s` seconds."""

    step: int
    wait_s: float


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The run is over; `why` it does not begin again, "" where that goes without saying."""

    why: str = ""


def decide(
    policy: RestartPolicy, attempt_ends: Sequence[AttemptEnd], checkpoints: Sequence[int], *, run_start_step: int
) -> Restart | Stop:
    """What follows the newest of `endings`, which are those of all starts of the run so far.

    `checkpoints`: the steps of those that are there; `origin`: the step at which the run began.
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
            why=f"no checkpoint is left from before step {attempt_end.attempt_start_step}, where this start had begun"
        )
    return Restart(step=step, wait_s=wait_before(policy, attempt_ends))


def choose_step(attempt_ends: Sequence[AttemptEnd], checkpoints: Sequence[int], *, run_start_step: int) -> int | None:
    """The step after which a run goes on; None: a divergence came back, and there is nothing older to go back to."""
    attempt_end = attempt_ends[-1]
    newest = max(checkpoints, default=None)
    before = [other.last_step for other in attempt_ends[:-1] if other.exit_code == EXIT_DIVERGED]
    came_back = attempt_end.exit_code == EXIT_DIVERGED and bool(before) and (newest is None or newest <= max(before))
    if came_back:
        return max((step for step in checkpoints if step < attempt_end.attempt_start_step), default=None)
    return run_start_step if newest is None else newest


def wait_before(policy: RestartPolicy, attempt_ends: Sequence[AttemptEnd]) -> float:
    """Seconds from the newest ending to the restart."""
    wait_s = policy.backoff_s
    for number in range(len(attempt_ends) - 1, 0, -1):
        if attempt_ends[number].last_step > max(attempt_end.last_step for attempt_end in attempt_ends[:number]):
            break
        wait_s *= 2
    return min(wait_s, policy.max_backoff_s)


def _is_defect(attempt_ends: Sequence[AttemptEnd]) -> str:
    """Why an exception would only come again; "" when it might not."""
    attempt_end = attempt_ends[-1]
    if attempt_end.last_step == attempt_end.attempt_start_step:
        return "not restarted: it failed before the first step was done"
    others = [other for other in attempt_ends[:-1] if other.exit_code == attempt_end.exit_code]
    if any(other.last_step == attempt_end.last_step for other in others):
        return f"not restarted again: it has failed at the same step before, after step {attempt_end.last_step}"
    return ""


def _by_hand(checkpoints: Sequence[int]) -> str:
    if not checkpoints:
        return "there is no checkpoint to go on from (checkpoint.every)"
    return f"run.resume=auto goes on from the checkpoint of step {max(checkpoints)}"
