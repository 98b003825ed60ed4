"""When a run stops because its validation loss no longer falls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel3d.door.early_stopping import EarlyStopping, num_since_lowest
from parallel3d.door.result import TrainResult
from parallel3d.errors import UserError


def stopped_at(stopping: EarlyStopping, *evaluations: tuple[int, float | None]) -> int | None:
    """The step of the evaluation at which it stops, if it does."""
    from parallel3d import StopTraining

    for step, loss in evaluations:
        try:
            stopping.on_evaluation({"event": "evaluation", "step": step, "loss": loss})
        except StopTraining:
            return step
    return None


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([], 0), ([3.0], 0), ([3.0, 2.0], 0), ([2.0, 3.0], 1), ([2.0, 2.0, 2.0], 2), ([3.0, 1.0, 2.0, 1.5], 2)],
)
def test_evaluations_since_the_lowest(losses: list[float], expected: int) -> None:
    assert num_since_lowest(dict(enumerate(losses))) == expected


def test_nan_is_never_the_lowest() -> None:
    assert num_since_lowest({1: 3.0, 2: float("nan"), 3: None}) == 2
    assert num_since_lowest({1: float("nan"), 2: 3.0}) == 0


def test_it_waits_for_its_patience() -> None:
    course = ((10, 3.0), (20, 2.0), (30, 2.5), (40, 1.9), (50, 2.0), (60, 1.95), (70, 1.0))
    assert stopped_at(EarlyStopping(patience=1), *course) == 30
    assert stopped_at(EarlyStopping(), *course) == 60
    assert stopped_at(EarlyStopping(patience=3), *course) is None
    with pytest.raises(UserError, match="patience=0"):
        EarlyStopping(patience=0)


def test_an_evaluation_that_comes_again_counts_once() -> None:
    """As after a restart, which goes back to a checkpoint."""
    assert stopped_at(EarlyStopping(), (10, 2.0), (20, 2.5), (20, 2.5), (10, 2.0), (20, 2.5)) is None
    assert stopped_at(EarlyStopping(), (10, 2.0), (20, 2.5), (20, 2.5), (30, 2.6)) == 30


def test_a_resumed_runs_evaluations_count(tmp_path: Path) -> None:
    lines = [{"event": "evaluation", "step": step, "loss": loss} for step, loss in ((10, 2.0), (20, 2.5))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [{"step": 9}, *lines]))
    stopping = EarlyStopping()
    stopping.on_start(tmp_path)
    assert stopped_at(stopping, (20, 2.5), (30, 2.4)) == 30
    EarlyStopping().on_start(tmp_path / "new")


def test_the_best_checkpoint_is_the_links(tmp_path: Path) -> None:
    result = TrainResult(tmp_path, 0, tmp_path)
    assert result.best_checkpoint is None
    (tmp_path / "step-00000010").mkdir()
    (tmp_path / "best").symlink_to("step-00000010")
    assert result.best_checkpoint == (tmp_path / "step-00000010").resolve()
