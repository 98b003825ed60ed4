"""Real signals to gloo processes, at every coordinate and in every phase: the run goes on as if undisturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import process_kills
from tests.support.kill_cells import KillCell
from tests.support.kill_layouts import EARLY, LATE
from tests.support.process_kills import EVERY_KIND, covering_cells, describe_failure, special_cells

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CELLS = list(covering_cells())


@pytest.fixture(scope="module")
def kill_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the selected cells, run once."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = [each["cell"].name for each in parameters if isinstance(each.get("cell"), KillCell)]
    folder = tmp_path_factory.mktemp("kills")
    with open(folder / "output.txt", "w") as output:
        command = [sys.executable, "-m", process_kills.__name__, str(folder), *names]
        subprocess.run(command, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    return folder


@pytest.mark.sample(1, rest=14)
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=cell.name, marks=[] if cell == EVERY_KIND else pytest.mark.full) for cell in CELLS],
)
def test_the_run_goes_on_as_if_undisturbed(kill_folder: Path, cell: KillCell):
    assert describe_failure(kill_folder, cell) == ""


def test_the_cells_cover_every_phase_and_kind():
    singles = [cell for cell in CELLS if cell not in list(special_cells())]
    assert len(singles) == 22
    phases = Counter(cell.faults[0].phase for cell in singles)
    assert set(phases) == {*EARLY, *LATE} and min(phases.values()) >= 2
    assert {fault.kind for cell in CELLS for fault in cell.faults} == {"kill", "stop", "term"}
