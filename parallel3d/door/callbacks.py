"""Callbacks of `parallel3d.train`: called while the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel3d.door.result import TrainResult

Line = dict[str, Any]


class StopTraining(Exception):
    """Raise it in a callback: the run saves and ends as after Ctrl-C, and `train` returns its result."""


class Callback:
    """Override what you need. All methods are called in the caller's process, in the thread that called `train`.

    They follow the run at a distance: a slow one delays its own next call and nothing else. An exception in one stops
    the run, and `train` raises it. A line is one of metrics.jsonl.
    """

    def on_start(self, run_folder: Path) -> None:
        """The workers are about to start; the run folder exists."""

    def on_step(self, line: Line) -> None:
        """A step is complete: step, loss, grad_norm, lr, tokens_per_s, ..."""

    def on_evaluation(self, line: Line) -> None:
        """An evaluation is complete: step, loss."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint is complete on disk."""

    def on_membership_change(self, line: Line) -> None:
        """Workers were lost or have joined: step, who, joined, why, and the seconds that it took."""

    def on_event(self, line: Line) -> None:
        """Any other event: a notice, a restart, a failure, ..."""

    def on_end(self, result: TrainResult) -> None:
        """The run is over, well or not: result.exit_code says which."""


class _StepFunction(Callback):
    def __init__(self, function: Callable[[Line], object]):
        self._function = function

    def on_step(self, line: Line) -> None:
        self._function(line)


def as_callbacks(given: Iterable[Callback | Callable[[Line], object]]) -> list[Callback]:
    """The callbacks; a plain function becomes one that gets the steps."""
    return [each if isinstance(each, Callback) else _StepFunction(each) for each in given]


def deliver(line: Line, run_folder: Path, callbacks: Iterable[Callback]) -> None:
    """Hands one line of metrics.jsonl to the method that it belongs to, of every callback."""
    for callback in callbacks:
        match line.get("event"):
            case None:
                callback.on_step(line)
            case "evaluation":
                callback.on_evaluation(line)
            case "membership":
                callback.on_membership_change(line)
            case "started":
                callback.on_start(run_folder)
            case _:
                callback.on_event(line)
