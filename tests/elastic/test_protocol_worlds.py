"""Everything that can happen to the membership protocol: all of small worlds, random ways through larger ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.parallel.grid import Grid
from tests.support.protocol_model import Model
from tests.support.protocol_search import explore, walk
from tests.support.protocol_steps import (
    uniform,
)
from tests.support.protocol_takeover import TakeoverModel
from tests.support.protocol_world import CONFIRMED, RESOLVED, RUN, Frame, World, freeze
from tests.support.tiers import examples


@pytest.mark.full
def test_two_deaths_anywhere_in_two_stages_of_two_replicas():
    model = Model(uniform(2, 2), num_iterations=2)
    found = explore(model, model.start(deaths=2))
    assert found.num_worlds > 40_000 and found.ends.keys() == {"released", "halted"}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("grid", "settings", "faults"),
    [
        (uniform(1, 3), {}, {"deaths": 3}),
        (uniform(1, 2, tp=2), {}, {"deaths": 1, "drains": 1}),
        (uniform(1, 3), {"zero_stage": 0}, {"deaths": 2}),
        (uniform(1, 2, tp=2), {}, {"deaths": 2}),
        (uniform(1, 3), {}, {"deaths": 1, "suspicions": 1}),
        (uniform(1, 3), {}, {"deaths": 1, "drains": 2}),
        (uniform(1, 3), {"zero_backups": 0}, {"deaths": 2}),
    ],
)
def test_other_small_worlds(grid: Grid, settings: dict[str, int], faults: dict[str, int]):
    model = Model(grid, num_iterations=1, **settings)
    found = explore(model, model.start(**faults))
    assert "released" in found.ends and found.num_worlds > 100


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("grid", "faults"),
    [
        (uniform(1, 2), {"deaths": 1, "suspicions": 1}),
        (uniform(2, 2), {"deaths": 1}),
        (uniform(1, 3), {"deaths": 2}),
        (uniform(1, 2), {"deaths": 1, "drains": 1}),
    ],
)
def test_the_reduction_leaves_nothing_out(grid: Grid, faults: dict[str, int]):
    """The same decisions on the same reports, the same ends, with it and without."""
    found = {}
    for reduced in (True, False):
        model = Model(grid, num_iterations=1, reduced=reduced)
        ends = explore(model, model.start(**faults)).ends.keys()
        found[reduced] = ends, {decision(record) for record in model.records}, model.reports
    assert found[True] == found[False]


class NotesFaults(TakeoverModel):
    """Keeps the modes of the workers in each world in which one of them dies, or the coordinator is lost."""

    def _kill(self, world: World, rank: int) -> World:
        self.requests.add(("death", *(worker.mode for worker in world.workers)))
        return super()._kill(world, rank)

    def _take_over(self, world: World, *, keeps_frames: bool, late: tuple[int, ...] = ()) -> World:
        self.requests.add(("takeover", *(worker.mode for worker in world.workers)))
        return super()._take_over(world, keeps_frames=keeps_frames, late=late)


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({"deaths": 1}, {("death", CONFIRMED, RESOLVED), ("death", RESOLVED, CONFIRMED), ("death", RUN, RUN)}),
        ({"takeovers": 1}, {("takeover", CONFIRMED, RUN), ("takeover", RUN, CONFIRMED)}),
    ],
)
def test_faults_between_moves_that_are_not_tried_in_every_order(faults: dict[str, int], expected: set[Frame]):
    model = NotesFaults(uniform(1, 2), num_iterations=2)
    explore(model, model.start(**faults))
    assert expected <= model.requests


def decision(record: GenerationRecord) -> tuple[object, ...]:
    """What matters of a record: not in which order workers died, nor whether they had reported before."""
    evicted = frozenset(loss.rank for loss in record.evicted)
    return freeze(replace(record, hosts={}, evicted=())), evicted


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Model, dict[str, int]]:
    grid = Grid.of_replicas(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), tp_size=draw(st.integers(1, 2)))
    hosts = {rank: str(draw(st.integers(0, 2))) for rank in grid.ranks}
    model = Model(
        grid,
        num_iterations=draw(st.integers(1, 4)),
        zero_stage=draw(st.sampled_from([1, 1, 0])),
        zero_backups=draw(st.sampled_from([1, 1, 0])),
        hosts=hosts,
        reduced=False,
    )
    faults = {"deaths": draw(st.integers(0, 4)), "suspicions": draw(st.integers(0, 3))}
    return model, {**faults, "drains": draw(st.integers(0, 2))}


@settings(max_examples=examples(400))
@given(world=worlds(), seed=st.integers(0, 2**32), fault_rate=st.sampled_from([0.01, 0.05, 0.3]))
def test_random_ways_through_larger_worlds(world: tuple[Model, dict[str, int]], seed: int, fault_rate: float):
    model, faults = world
    assert walk(model, model.start(**faults), seed, fault_rate=fault_rate).ended in ("released", "halted")
