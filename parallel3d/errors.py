"""The project's exceptions, one for each error that a caller can act on.

A `UserError` is printed as one message without a traceback; its `exit_code` becomes the run's.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.remote_address import without_secrets

EXIT_WORKER_LOST = 3
"""A run's exit code when a worker is gone and training can't go on without it."""

EXIT_COORDINATOR_LOST = 4
"""A run's exit code when its coordinator is gone and no guardian may take over."""

EXIT_REPLICAS_DIFFER = 5
"""A run's exit code when replicas that must be bitwise equal differ."""

EXIT_DIVERGED = 6
"""A run's exit code when training has diverged."""

EXIT_PREEMPTED = 7
"""A run's exit code when it has saved and ended, since hosts are taken away without which it can't go on."""

EXIT_OUT_OF_MEMORY = 8
"""A run's exit code when a worker can't allocate memory."""

_OUT_OF_MEMORY_PHRASES = ("out of memory", "can't allocate memory")
"""Of torch's CUDA and CPU allocators."""

MAX_PROBLEMS = 50
"""Problems that one message lists."""


class Parallel3dError(Exception):
    """The base of the project's exceptions."""

    exit_code = 1
    is_run_wide = False
    """True if it concerns the whole run, whichever worker raises it."""


class UserError(Parallel3dError):
    """A mistake that the user can fix; the message names what, where and how."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One broken rule of the configuration: where, what stands there, what is asked for, how to fix it."""

    field: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        field, value = shorten(self.field), shorten(without_secrets(repr(self.value)))
        rule, fix = shorten(without_secrets(self.rule), 1000), shorten(self.fix, 1000)
        return f"{field} = {value}: {rule}. {fix}"


def shorten(text: str, most: int = 200) -> str:
    """Returns `text`, cut after `most` characters: messages quote what they are about, however long it is."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


class ConfigError(UserError):
    """All broken rules of one configuration, or of the file `source` that changes it, raised once."""

    def __init__(self, problems: list[Problem], source: str = "the configuration"):
        self.problems = problems
        lines = "\n".join(f"  - {problem}" for problem in problems[:MAX_PROBLEMS])
        if len(problems) > MAX_PROBLEMS:
            lines += f"\n  ... and {len(problems) - MAX_PROBLEMS:,} more"
        super().__init__(f"{source} has {len(problems)} problem{'s' if len(problems) > 1 else ''}:\n{lines}")


class UserCodeError(UserError):
    """An error in a function or module of the user's; the message names the user's file and line."""

    is_run_wide = True


class DataError(UserError):
    """Text that can't be read or used: the message names the file."""


class CheckpointError(UserError):
    """A checkpoint that is damaged or belongs to another run; the message names the file, or the difference."""


class LaunchError(UserError):
    """The run can't be started: because of a launcher's variable, a port, or an unreachable address."""


class ScheduleError(Parallel3dError):
    """An invalid instruction list: out of order, unmatched, or stuck; names replica and instruction."""


class GenerationEnded(Parallel3dError):
    """The membership generation is over: raised by every blocking wait once its abort token is set."""


class ProtocolError(Parallel3dError):
    """A message that the protocol or the schedule does not allow here."""


class OutOfPlaceError(ProtocolError):
    """A frame that its sender may not send at this time, or whose content can't be read: the sender's fault alone."""


class ReplicasDiffer(Parallel3dError):
    """Copies of weights or optimizer state that must be bitwise equal differ; the message names them."""

    exit_code = EXIT_REPLICAS_DIFFER


class Diverged(Parallel3dError):
    """Training has diverged; the message names the step and the sign of it."""

    exit_code = EXIT_DIVERGED
    is_run_wide = True


class RunFailed(Parallel3dError):
    """A run of `parallel3d.train` ended with another exit code than 0; `result` is what there is of it."""

    def __init__(self, message: str, exit_code: int, result: object):
        super().__init__(message)
        self.exit_code = exit_code
        self.result = result


class RunEnded(Parallel3dError):
    """The coordinator has ended the run; the message is the reason."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator had no memory: torch's for devices or CPUs, or Python's. No other error counts."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _OUT_OF_MEMORY_PHRASES)


def exit_code_of(error: BaseException) -> int:
    """The exit code of a worker that this exception ends."""
    return EXIT_OUT_OF_MEMORY if is_out_of_memory(error) else int(getattr(error, "exit_code", 1))
