"""Fixtures of the trainer's tests."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support import cells, gloo_cells, tiny_runs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def run_layout():
    """run_layout(steps=3, slots=3, **sections) -> RunResult in threads."""
    return tiny_runs.train_in_threads


@pytest.fixture(scope="session")
def gloo_folder(request, tmp_path_factory):
    """Results of the gloo cells that the selected tests ask for, run once in one process of the launcher."""
    folder = tmp_path_factory.mktemp("cells")
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = [each["cell"].name for each in parameters if isinstance(each.get("cell"), cells.Cell)]
    gloo_names = [name for name in dict.fromkeys([*names, "gloo-pp2-dp2"]) if name in gloo_cells.GLOO_CELLS]
    if any(item.name == "test_fifty_steps_learn" for item in request.session.items):
        gloo_names.append("gloo-cube-fifty-steps")
    done = subprocess.run(
        [sys.executable, "-m", gloo_cells.__name__, str(folder), *dict.fromkeys(gloo_names)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def reference():
    """reference(cell): the same run on one rank, run once for all cells that share it."""
    known = cache(lambda key, steps: tiny_runs.train_in_threads(steps=steps, **json.loads(key)))
    return lambda cell: known(json.dumps(cell.reference.changes, sort_keys=True), cell.steps)
