"""The configuration's section `restart`, and its rules."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import NonNegativeFloat, NonNegativeInt

from parallel3d.config.rule import rule, too_large
from parallel3d.config.sections.section import Section
from parallel3d.errors import Problem


class RestartConfig(Section):
    """Restarts from a checkpoint with all workers, for when a run can't continue in place."""

    max_restarts: NonNegativeInt = 0
    """Restarts at most; needs checkpoint.every. 0: the run ends instead. Only without a launcher: launchers restart by
    themselves (torchrun --max-restarts N), and the run then resumes from its newest checkpoint."""
    backoff_s: NonNegativeFloat = 1.0
    """Seconds before a restart. Doubled with each further restart that doesn't get beyond the last step reached."""
    max_backoff_s: NonNegativeFloat = 300.0
    """Upper limit of the delay, in seconds; at least backoff_s."""
    skip_diverging_data: bool = True
    """After a divergence, skip the data that led to it: the lanes continue after it. false: the same data is read
    again, and the run diverges again unless a faulty machine was the cause."""


@rule("restart.max_restarts", "checkpoint.every")
def check_restart(max_restarts: int, checkpoint_every: int | None) -> Iterator[Problem]:
    """There are checkpoints to restart from."""
    if max_restarts and checkpoint_every is None:
        yield Problem(
            field="restart.max_restarts",
            value=max_restarts,
            rule="needs checkpoints to restart from, and checkpoint.every is null",
            fix="Set checkpoint.every to the steps that a restart may lose, or leave restart.max_restarts at 0",
        )


@rule("restart.backoff_s", "restart.max_backoff_s")
def check_backoff(backoff_s: float, max_backoff_s: float) -> Iterator[Problem]:
    """The first delay is within the limit."""
    if backoff_s > max_backoff_s:
        yield too_large("restart.backoff_s", backoff_s, "restart.max_backoff_s", max_backoff_s)
