"""One exception for each thing that a caller can act on.

Errors meant for a person (everything under `UserError`) are printed as one message without a traceback; their
`exit_code` becomes the run's.
"""

from __future__ import annotations

from dataclasses import dataclass

EXIT_WORKER_LOST = 3
"""A run's exit code when a worker is gone and training can't go on without it."""

EXIT_COORDINATOR_LOST = 4
"""A run's exit code when its coordinator is gone and nobody may take over."""

EXIT_REPLICAS_DIFFER = 5
"""A run's exit code when copies that must be the same bits are not."""

EXIT_DIVERGED = 6
"""A run's exit code when training has diverged."""


class Parallel3dError(Exception):
    """Root of this project's exceptions."""

    exit_code = 1
    is_run_wide = False
    """It says something of the whole run, whichever worker raises it."""


class UserError(Parallel3dError):
    """A mistake that the user can fix; the message says what, where and how."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One broken rule of the configuration: where, what stands there, what is asked for, how to fix it."""

    field: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.rule}. {self.fix}"


class ConfigError(UserError):
    """All broken rules of one configuration, raised once."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        lines = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"the configuration has {len(problems)} problem{'s' if len(problems) > 1 else ''}:\n{lines}")


class DataError(UserError):
    """Text that can't be read or used: the message names the file."""


class CheckpointError(UserError):
    """A checkpoint that is damaged, or of another run; the message names the file, or what differs."""


class LaunchError(UserError):
    """The run can't be started: a launcher's variable, a port, or an address that nobody answers at."""


class ScheduleError(Parallel3dError):
    """An instruction list that is wrong: out of order, unmatched, or stuck; names replica and instruction."""


class GenerationEnded(Parallel3dError):
    """This membership generation is over: raised out of every blocking wait once its abort token is set."""


class ProtocolError(Parallel3dError):
    """A message that is not the one the schedule promised."""


class ReplicasDiffer(Parallel3dError):
    """Copies of weights or optimizer state that must be the same bits are not; the message names them."""

    exit_code = EXIT_REPLICAS_DIFFER


class Diverged(Parallel3dError):
    """Training has diverged, and going on would be in vain; the message says in which step and by which sign."""

    exit_code = EXIT_DIVERGED
    is_run_wide = True


class RunEnded(Parallel3dError):
    """The coordinator has ended the run; the message says why."""
