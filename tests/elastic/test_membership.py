"""What travels between workers and the coordinator arrives as it was sent."""

from __future__ import annotations

import json
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.elastic.protocol.membership import (
    NO_GENERATION,
    GenerationRecord,
    LogPosition,
    LostWorker,
    StateReport,
    find_newcomers,
)
from parallel3d.elastic.protocol.record_delta import decode_record, encode_record
from parallel3d.errors import ProtocolError
from parallel3d.parallel.grid import Grid

positions = st.builds(LogPosition, iteration=st.integers(0, 9), evaluation=st.integers(0, 1))
texts = st.text(max_size=5)
addresses = st.tuples(texts, st.integers(0, 65535))
ranks = st.integers(0, 11)
rank_sets = st.sets(ranks).map(lambda some: tuple(sorted(some)))
losses = st.builds(LostWorker, rank=ranks, why=texts)
grids = st.builds(
    lambda counts, tp_size, lost: Grid.of_replicas(counts, tp_size=tp_size).without(lost)[0],
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    tp_size=st.integers(1, 2),
    lost=st.sets(ranks, max_size=3),
).filter(lambda grid: all(grid.stages))  # a stage without a replica ends the run, so no record has such a grid
reports = st.builds(
    StateReport,
    rank=ranks,
    generation=st.integers(0, 9),
    state_generation=st.integers(NO_GENERATION, 9),
    position=positions,
    digest=texts,
    version=st.integers(0, 9),
    host=texts,
    address=addresses,
)
records = st.builds(
    GenerationRecord,
    generation=st.integers(0, 9),
    grid=grids,
    previous=st.none() | grids,
    members=rank_sets,
    draining=rank_sets,
    evicted=st.lists(losses, max_size=2).map(tuple),
    position=positions,
    weights_gathered=st.booleans(),
    parts=st.dictionaries(ranks, st.tuples(st.integers(0, 2), st.integers(0, 1))),
    newcomers=rank_sets,
    hosts=st.dictionaries(ranks, texts),
    addresses=st.dictionaries(ranks, addresses),
    last_reported_step=st.integers(0, 9),
    reason=texts,
)


@given(report=reports)
def test_a_report_arrives_as_it_was_sent(report: StateReport):
    assert StateReport.from_json(json.loads(json.dumps(report.to_json()))) == report


@given(record=records, base=st.none() | records)
def test_a_record_arrives_as_it_was_sent(record: GenerationRecord, base: GenerationRecord | None):
    arrived = decode_record(encode_record(record, base), base)
    assert arrived == record
    assert hash(arrived.members) == hash(record.members)  # tuples, not lists
    assert arrived.grid.ranks == record.grid.ranks and arrived.grid.replicas == record.grid.replicas


def test_the_difference_is_small_and_needs_its_base():
    grid = Grid.uniform(tp_size=8, pp_size=8, dp_size=16)
    base, record = (
        GenerationRecord(
            generation=generation,
            grid=grid.without(lost)[0],
            previous=grid,
            members=tuple(rank for rank in grid.ranks if rank not in lost),
            hosts={rank: f"host{rank // 8}" for rank in grid.ranks},
            addresses={rank: (f"10.0.0.{rank // 8}", (7919 * rank * port) % 30_000) for rank in grid.ranks},
        )
        for generation, lost, port in ((3, [], 1), (5, [77], 2))
    )
    encoded = encode_record(record, base)
    assert len(encoded) < 2.5 * len(grid.ranks) < len(encode_record(record, None))
    assert decode_record(encoded, base) == record
    for wrong in (None, record):
        with pytest.raises(ProtocolError, match="record 5 is the difference from record 3"):
            decode_record(encoded, wrong)


def test_a_record_stays_small_however_many_have_joined():
    """One worker dies and one takes its place, again and again: what the last one of each has changed travels."""
    first = Grid.uniform(tp_size=8, pp_size=8, dp_size=16)
    base = GenerationRecord(generation=0, grid=first, previous=None, members=first.ranks)
    sizes = []
    for number in range(60):
        lost = (17 * number) % len(first.ranks)
        if not base.grid.holds(lost):
            continue
        replica, new = base.grid.coordinates(lost).replica, len(first.ranks) + number
        ranks = tuple(new if rank == lost else rank for rank in base.grid.tp_ranks(replica))
        left, spares = base.grid.without([lost])
        for grid in (left, left.with_replica(replica, ranks)):
            members = tuple(sorted({*base.members, new} - {lost}))
            record = GenerationRecord(
                generation=base.generation + 1,
                grid=grid,
                previous=base.grid,
                members=members,
                parts={rank: (replica[0], 0) for rank in spares if grid is left} | {9999: (0, 0)},
                newcomers=find_newcomers(grid, base),
                hosts={rank: f"host{rank // 8}" for rank in (*first.ranks, *range(len(first.ranks), new + 1))},
            )
            encoded = encode_record(record, base)
            assert decode_record(encoded, base) == record
            sizes.append(len(encoded))
            base = record
    assert len(base.newcomers) > 100 and max(sizes[-4:]) < 400 < 3 * min(sizes[1:5])  # after the first, with all hosts


def test_positions_compare_by_iteration_first():
    assert LogPosition(iteration=7) > LogPosition(iteration=6, evaluation=1) > LogPosition(iteration=6)


def test_spares_are_members_without_place_that_stay():
    grid, _ = Grid.uniform(tp_size=2, pp_size=1, dp_size=3).without([1, 2])
    record = GenerationRecord(generation=1, grid=grid, previous=None, members=(0, 3, 4, 5), draining=(3,))
    assert record.spares == (0,)


def test_a_record_with_a_filled_vacancy_travels():
    first = Grid.uniform(tp_size=2, pp_size=1, dp_size=2)
    base = GenerationRecord(generation=1, grid=first.without([0])[0], previous=first, members=(1, 2, 3))
    filled = base.grid.with_replica((0, 0), (4, 1))
    record = GenerationRecord(
        generation=2,
        grid=filled,
        previous=base.grid,
        members=(1, 2, 3, 4, 5),
        parts=MappingProxyType({5: (0, 1)}),
        newcomers=(1, 4),
    )
    assert decode_record(encode_record(record, base), base) == record
    assert record.joiners == (1, 4) and record.state_source == record.leader == 2 and record.spares == (5,)
