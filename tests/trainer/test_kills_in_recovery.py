"""More workers die while the others recover from a death: one change or two, or the run says what is missing."""

from __future__ import annotations

import pytest

from tests.support.kill_cells import (
    KillCell,
    possible_outcomes,
    recovery_cells,
    tied_recovery_cells,
    trio_cells,
)
from tests.support.thread_kills import check_cell


@pytest.mark.sample(4, rest=18)
@pytest.mark.parametrize("cell", list(recovery_cells()), ids=lambda cell: cell.name)
def test_a_second_death(cell: KillCell):
    check_cell(cell)


@pytest.mark.sample(4, rest=12)
@pytest.mark.parametrize("cell", list(tied_recovery_cells()), ids=lambda cell: cell.name)
def test_a_second_death_of_holders_of_a_shared_matrix(cell: KillCell):
    """Owner and backup of a range of the matrix are owner and backup of a range of their stage: the message for the
    loss of both names both ranks."""
    done = check_cell(cell)
    first, second = (fault.rank for fault in cell.faults)
    if done.abort_reason:
        named = [f"ranks {a} and {b} were lost" for a, b in ((first, second), (second, first))]
        assert any(words in done.abort_reason for words in (*named, "no replica left"))


@pytest.mark.sample(4)
@pytest.mark.parametrize("cell", list(trio_cells()), ids=lambda cell: cell.name)
def test_two_more_deaths_before_the_new_generation(cell: KillCell):
    check_cell(cell)


@pytest.mark.parametrize("cells", [recovery_cells, tied_recovery_cells, trio_cells])
def test_the_cells_end_both_ways(cells):
    ways = {outcome.goes_on for cell in cells() for outcome in possible_outcomes(cell.config, cell.faults)}
    assert ways == {True, False}
