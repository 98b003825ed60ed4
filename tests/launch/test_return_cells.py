"""Lost workers are replaced, however the run was started and whatever it was doing; the losses do not change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.network_hosts import why_not
from tests.support.return_cells import BIN, ReturnCell, return_cells, run_return_cell, train_undisturbed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, text) -> Callable[[int], list[float]]:
    """The losses of at least so many steps of one process."""
    folder, known = tmp_path_factory.mktemp("undisturbed"), list[float]()

    def losses(num_steps: int) -> list[float]:
        if len(known) < num_steps:
            known[:] = train_undisturbed(folder, text, 2 * num_steps)
        return known

    return losses


@pytest.mark.full
@pytest.mark.sample(0, rest=3)
@pytest.mark.parametrize("cell", return_cells(), ids=lambda cell: cell.name)
def test_return_cells(cell: ReturnCell, tmp_path, text, undisturbed):
    if cell.launcher == "deepspeed" and not (BIN / "deepspeed").exists():
        pytest.skip("deepspeed is not installed")
    if cell.launcher == "hosts" and (why := why_not()):
        pytest.skip(why)
    wrong = run_return_cell(cell, tmp_path, text, undisturbed)
    assert not wrong, "\n".join(wrong)
