"""A worker dies at every place and in every phase: the run goes on as if nothing had happened.

tests/support/kill_cells.py has the table and the rules by which each cell is judged.
"""

from __future__ import annotations

import pytest

from tests.support.kill_cells import KillCell, base_cells
from tests.support.thread_kills import check_cell


@pytest.mark.each_value
@pytest.mark.parametrize("cell", list(base_cells()), ids=lambda cell: cell.name)
def test_one_death(cell: KillCell):
    check_cell(cell)
