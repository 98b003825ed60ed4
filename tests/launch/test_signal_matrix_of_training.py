"""The signal matrix with real training: each process, the launcher's included, is stopped, stopped for a moment, or
killed in an evaluation, a save, or a recovery that has just made its new groups. The run goes on, or ends with its
documented code; no checkpoint is damaged.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.launch_runs import finish, metrics
from tests.support.training_cells import UNDISTURBED, run_training_cell, start_training, training_cells

AT_ONCE = 6
"""Runs at the same time: they mostly wait."""


@pytest.fixture(scope="module")
def losses(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("undisturbed")
    (process,) = start_training(UNDISTURBED, folder, text)
    code, out, err = finish(process)
    assert code == 0, out + err
    return [line["loss"] for line in metrics(folder / "run")]


@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.slow
@pytest.mark.parametrize("has_torchrun", [False, True])
def test_signals_in_training(tmp_path, text, losses, has_torchrun):
    def run(cell):
        return run_training_cell(cell, tmp_path / cell.name, text, losses)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = list(pool.map(run, training_cells(has_torchrun)))
    assert not any(wrong), "\n\n".join(filter(None, wrong))
