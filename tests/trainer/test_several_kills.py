"""Workers die in several steps: the run goes on until a stage or a range of state is lost."""

from __future__ import annotations

import pytest

from tests.support.kill_cells import (
    KillCell,
    down_to_one_cells,
    possible_outcomes,
    precision_series_cells,
    random_cells,
    schedule_pair_cells,
)
from tests.support.thread_kills import check_cell


@pytest.mark.sample(3, rest=8)
@pytest.mark.parametrize("cell", list(random_cells()), ids=lambda cell: cell.name)
def test_random_deaths(cell: KillCell):
    check_cell(cell)


def test_random_deaths_do_not_all_end_alike():
    """Some of these runs must go on, some must stop."""
    kinds = {frozenset(o.goes_on for o in possible_outcomes(cell.config, cell.faults)) for cell in random_cells()}
    assert {frozenset({True}), frozenset({False})} <= kinds


@pytest.mark.sample(2, rest=3)
@pytest.mark.parametrize("cell", list(schedule_pair_cells()), ids=lambda cell: cell.name)
def test_deaths_at_two_stages_under_every_schedule(cell: KillCell):
    done = check_cell(cell)
    assert done.steps[5]["planned_bubble"] != done.steps[1]["planned_bubble"]
    assert all(0 <= record["bubble"] < 1 for record in done.steps.values() if "bubble" in record)


@pytest.mark.sample(1, rest=1)
@pytest.mark.parametrize("cell", list(precision_series_cells()), ids=lambda cell: cell.name)
def test_four_deaths_in_another_precision(cell: KillCell):
    assert not check_cell(cell).abort_reason


@pytest.mark.sample(1, rest=3)
@pytest.mark.parametrize("cell", list(down_to_one_cells()), ids=lambda cell: cell.name)
def test_down_to_one_replica_of_each_stage(cell: KillCell):
    done = check_cell(cell)
    assert not done.abort_reason and done.num_changes == 6
