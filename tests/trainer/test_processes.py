"""What gloo processes show beyond their equality with one process."""

import pytest

from tests.support.cell_table import CELLS
from tests.support.cells import run_cell
from tests.support.gloo_cells import load_gloo_cell

pytestmark = pytest.mark.slow
BY_NAME = {cell.name: cell for cell in CELLS}


def test_threads_and_processes_are_the_same_run(gloo_folder):
    """Same layout, same kernels: only the transports differ, and the order in which they add."""
    cell = BY_NAME["gloo-pp2-dp2"]
    processes, threads = load_gloo_cell(gloo_folder, cell), run_cell(cell)
    assert processes.losses == pytest.approx(threads.losses, rel=1e-14)
    assert [entry.cursors for entry in processes.entries] == [entry.cursors for entry in threads.entries]


@pytest.mark.full
def test_fifty_steps_learn(gloo_folder):
    """The run that follows one process for fifty steps is a run that learns."""
    losses = load_gloo_cell(gloo_folder, BY_NAME["gloo-cube-fifty-steps"]).losses
    assert losses[-1] < 0.8 * losses[0]
