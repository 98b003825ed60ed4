"""The seconds from a strike until a run goes on, or has ended; the patience of each cell of the signal matrix."""

from __future__ import annotations

import pytest

from tests.support.patience import Cell, is_lost, patience_s
from tests.support.signal_cells import STUB_AND_COORDINATOR, SignalCell, all_signal_cells
from tests.support.strike_clock import Step, Strike, read_steps, settled_s
from tests.support.training_cells import GROUPS, TrainingCell, all_training_cells

STUB, GUARDIAN, WORKER = 1, 2, 3
STRIKE = Strike(
    struck_s=10.0,
    below=[GUARDIAN, WORKER],
    children=[WORKER],
    started=[STUB],
    ended_s={STUB: 30.0, GUARDIAN: 12.0, WORKER: 12.5},
)
BEFORE, OLD, NEW, LAST = Step(0, 4, 9.0), Step(0, 5, 10.5), Step(1, 6, 11.0), Step(1, 9, 20.0)


@pytest.mark.parametrize(
    ("steps", "newer_than", "must_end", "stays", "expected"),
    [
        ([BEFORE, OLD, NEW, LAST], -1, False, [], 0.5),
        ([BEFORE, OLD, NEW, LAST], 0, False, [], 1.0),
        ([BEFORE, OLD, NEW, LAST], 0, True, [], 2.5),
        ([BEFORE, OLD, NEW, LAST], 0, True, [WORKER], 2.0),
        ([BEFORE, OLD, NEW, LAST], 1, False, [], None),
        ([BEFORE, OLD, NEW], 0, True, [], 20.0),
        ([BEFORE, OLD, NEW], 0, True, [STUB], 2.5),
        ([], 0, True, [STUB], 2.5),
    ],
)
def test_seconds_until_a_run_has_settled(steps, newer_than, must_end, stays, expected):
    found = settled_s(STRIKE, steps, last_step=9, newer_than=newer_than, must_end=must_end, stays=stays)
    assert found == expected


def test_a_process_that_does_not_end():
    strike = Strike(10.0, [WORKER], [], [], {WORKER: None})
    assert settled_s(strike, [LAST], last_step=9, newer_than=0, must_end=False, stays=[]) == 10.0
    for steps in ([LAST], []):
        assert settled_s(strike, steps, last_step=9, newer_than=0, must_end=True, stays=[]) is None


def test_steps_of_a_worker_that_was_killed_while_it_wrote(tmp_path):
    (tmp_path / "steps-0").write_text("0 1 2.5000\n0 2 3.0")
    (tmp_path / "steps-1").write_text("0 1 2.5500\n")
    assert sorted(step.made_s for step in read_steps(tmp_path)) == [2.5, 2.55]


@pytest.mark.parametrize(
    ("cell", "patience", "loses"),
    [
        (SignalCell(1, "worker", 0, "KILL", "step"), 0.0, True),
        (SignalCell(1, "worker", 0, "STOP", "step"), 1.0, True),
        (SignalCell(1, "worker", 0, "STOP", "start"), 6.0, True),
        (SignalCell(1, "worker", 0, "CONT 0.3", "step"), 0.3, False),
        (SignalCell(1, "worker", 0, "CONT 3", "step"), 1.0, True),
        (SignalCell(1, "worker", 0, "CONT 3", "start"), 3.0, False),
        (SignalCell(3, "guardian", 1, "STOP", "confirm"), 4.5, True),
        (SignalCell(3, "coordinator", 0, "CONT 3", "confirm"), 3.0, False),
        (SignalCell(3, "stub", 0, "STOP", "step"), 0.0, False),
        (SignalCell(3, "stub", 0, "KILL", "step"), 0.0, True),
        (SignalCell(3, "stub", 0, "KILL", "confirm"), 0.0, True),
        (SignalCell(3, "stub", 0, "KILL", "commit"), 5.0, True),
        (SignalCell(3, "stub", 1, "KILL", "commit"), 0.0, True),
        (SignalCell(3, "launcher", 0, "KILL", "moves", has_torchrun=True), 6.0, True),
        (SignalCell(1, "launcher", 0, "KILL", "step", has_torchrun=True), 1.0, True),
        (SignalCell(1, "launcher", 0, "CONT 3", "step", has_torchrun=True), 0.0, False),
        (SignalCell(3, STUB_AND_COORDINATOR, 0, "STOP", "step"), 5.0, True),
        (SignalCell(3, STUB_AND_COORDINATOR, 0, "CONT 0.3", "step"), 0.3, True),
        (TrainingCell(False, "launcher", "KILL", "save"), 0.0, True),
        (TrainingCell(True, "launcher", "KILL", "save"), 1.0, True),
        (TrainingCell(False, "worker", "STOP", "save"), 1.0, True),
        (TrainingCell(False, "worker", "CONT 0.3", "save"), 0.3, False),
        (TrainingCell(False, "worker", "CONT 3", "save"), 1.0, True),
        (TrainingCell(False, "worker", "STOP", GROUPS), 1.0, True),
        (TrainingCell(True, "stub", "KILL", GROUPS, 3, 0), 5.0, True),
        (TrainingCell(True, "stub", "KILL", GROUPS, 3, 1), 0.0, True),
    ],
    ids=lambda value: value.name if isinstance(value, Cell) else str(value),
)
def test_patience(cell, patience, loses):
    assert (patience_s(cell), is_lost(cell)) == (patience, loses)


def test_every_cell_has_a_patience():
    assert all(0.0 <= patience_s(cell) <= 10.0 for cell in [*all_signal_cells(), *all_training_cells()])
