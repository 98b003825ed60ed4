"""Early stopping: a callback that ends a run once its validation loss no longer falls (Prechelt 1998, "Early stopping -
but when?").

What it stops at is not the best: `TrainResult.best_checkpoint` is, if checkpoints are written at evaluated steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path

from parallel3d.door.callbacks import Callback, Line, StopTraining
from parallel3d.errors import UserError
from parallel3d.monitor.run_folder import METRICS, iterate_metrics


class EarlyStopping(Callback):
    """Stops the run when `patience` evaluations in a row have had no lower loss than the lowest before them.

    A resumed run's earlier evaluations count. Evaluations that a restart has lost do not: they come again.
    """

    def __init__(self, patience: int = 2):
        if patience < 1:
            raise UserError(f"EarlyStopping(patience={patience}): must be at least 1, the evaluations to wait for")
        self.patience = patience
        self._losses: dict[int, float | None] = {}

    def on_start(self, run_folder: Path) -> None:
        path = run_folder / METRICS
        for line in iterate_metrics(path) if path.exists() else ():
            if line.get("event") == "evaluation":
                self._add(line)

    def on_evaluation(self, line: Line) -> None:
        """Raises StopTraining."""
        self._add(line)
        if num_since_lowest(self._losses) >= self.patience:
            raise StopTraining

    def _add(self, line: Line) -> None:
        before = {step: loss for step, loss in self._losses.items() if step < line["step"]}
        self._losses = {**before, line["step"]: line["loss"]}


def num_since_lowest(losses: Mapping[int, float | None]) -> int:
    """The number of evaluations after the first one with the lowest loss; losses by ascending step. One that is not a
    finite number is never the lowest."""
    values = [loss if loss is not None and isfinite(loss) else float("inf") for loss in losses.values()]
    return len(values) - 1 - values.index(min(values)) if values else 0
