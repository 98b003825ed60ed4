"""A worker dies at every place and in every phase: the run goes on as if nothing had happened.

tests/support/kill_cells.py has the table and the rules by which each cell is judged.
"""

from __future__ import annotations

import pytest

from parallel3d.inprocess.thread_group import ThreadGroup
from tests.support.kill_cells import KillCell, base_cells
from tests.support.thread_kills import assert_same_run, check_cell, run, undisturbed
from tests.support.tiny_runs import make_config


@pytest.mark.each_value(rest=20)
@pytest.mark.parametrize("cell", list(base_cells()), ids=lambda cell: cell.name)
def test_one_death(cell: KillCell):
    check_cell(cell)


@pytest.mark.each_value(rest=20)
@pytest.mark.parametrize("cell", list(base_cells()), ids=lambda cell: cell.name)
def test_one_death_where_backups_reduce_their_ranges_themselves(cell: KillCell, monkeypatch):
    """As in memory that ranks share: against the run in which owners send them."""
    undisturbed(cell.layout, cell.num_steps)
    monkeypatch.setattr(ThreadGroup, "reduces_parts", True)
    check_cell(cell)


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16_sr"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_backups_that_reduce_their_ranges_themselves_hold_what_owners_send(policy: str, kind: str, monkeypatch):
    """Owners and backups are compared in every step."""
    config = make_config(
        parallel=dict(dp_size=3, tp_size=2),
        precision=dict(policy=policy),
        optimizer=dict(kind=kind),
        debug=dict(replica_check_every=1),
    )
    sent = run(config)
    monkeypatch.setattr(ThreadGroup, "reduces_parts", True)
    assert_same_run(run(config), sent)
