"""What travels between workers and the coordinator arrives as it was sent."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from parallel3d.elastic.protocol.membership import (
    NO_GENERATION,
    GenerationRecord,
    LogPosition,
    LostWorker,
    StateReport,
    grid_from_json,
    grid_to_json,
)
from parallel3d.parallel.grid import Grid

positions = st.builds(LogPosition, iteration=st.integers(0, 9), evaluation=st.integers(0, 1))
texts = st.text(max_size=5)
addresses = st.tuples(texts, st.integers(0, 65535))
ranks = st.integers(0, 11)
entries = st.lists(
    st.dictionaries(texts, st.floats(allow_nan=False) | st.integers() | texts, max_size=2), max_size=2
).map(tuple)
losses = st.builds(LostWorker, rank=ranks, why=texts)
grids = st.builds(
    lambda counts, tp_size, lost: Grid.of_replicas(counts, tp_size=tp_size).without(lost)[0],
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    tp_size=st.integers(1, 2),
    lost=st.sets(ranks, max_size=3),
)
reports = st.builds(
    StateReport,
    rank=ranks,
    generation=st.integers(0, 9),
    state_generation=st.integers(NO_GENERATION, 9),
    position=positions,
    entries=entries,
    version=st.integers(0, 9),
    host=texts,
    address=addresses,
)
records = st.builds(
    GenerationRecord,
    generation=st.integers(0, 9),
    grid=grids,
    previous=st.none() | grids,
    members=st.lists(ranks, unique=True).map(tuple),
    draining=st.lists(ranks, unique=True).map(tuple),
    evicted=st.lists(losses, max_size=2).map(tuple),
    position=positions,
    entries=entries,
    hosts=st.dictionaries(ranks, texts),
    addresses=st.dictionaries(ranks, addresses),
    last_reported_step=st.integers(0, 9),
    reason=texts,
)


@given(report=reports)
def test_a_report_arrives_as_it_was_sent(report: StateReport):
    assert StateReport.from_json(json.loads(json.dumps(report.to_json()))) == report


@given(record=records)
def test_a_record_arrives_as_it_was_sent(record: GenerationRecord):
    arrived = GenerationRecord.from_json(json.loads(json.dumps(record.to_json())))
    assert arrived == record
    assert hash(arrived.members) == hash(record.members)  # tuples, not lists


@given(grid=grids)
def test_a_grid_arrives_as_it_was_sent(grid: Grid):
    arrived = grid_from_json(json.loads(json.dumps(grid_to_json(grid))))
    assert arrived == grid and arrived.ranks == grid.ranks and arrived.replicas == grid.replicas


def test_positions_compare_by_iteration_first():
    assert LogPosition(iteration=7) > LogPosition(iteration=6, evaluation=1) > LogPosition(iteration=6)


def test_spares_are_members_without_place_that_stay():
    grid, _ = Grid.uniform(tp_size=2, pp_size=1, dp_size=3).without([1, 2])
    record = GenerationRecord(generation=1, grid=grid, previous=None, members=(0, 3, 4, 5), draining=(3,))
    assert record.spares == (0,)
