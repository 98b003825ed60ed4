"""A worker dies on other schedules, models, policies and data: the run goes on as if nothing had happened."""

from __future__ import annotations

import pytest

from tests.support.kill_cells import KillCell, variant_cells
from tests.support.kill_layouts import config_of
from tests.support.thread_kills import check_cell, run, undisturbed


@pytest.mark.each_value(rest=18)
@pytest.mark.parametrize("cell", list(variant_cells()), ids=lambda cell: cell.name)
def test_one_death(cell: KillCell):
    check_cell(cell)


@pytest.mark.parametrize("layout", ["documents-pp3-dp2", "documents-zb-v"])
def test_documents_end_within_the_sequences_of_these_runs(layout: str):
    config = config_of(layout, num_steps=1)
    together = config.model_copy(update={"data": config.data.model_copy(update={"document_mask": False})})
    assert run(config).steps[1]["loss"] != run(together).steps[1]["loss"]


def test_the_weights_of_a_blend_change_within_the_step_of_the_death():
    """The entry of step 2 has cursors of both stages of the blend."""
    stages = [[cursor[0] for cursor in entry.cursors] for entry in undisturbed("blend-pp2-dp2-tp2").run.entries]
    assert stages == [[0, 0, 1, 1], [1] * 4]
