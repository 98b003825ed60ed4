"""A coordinator that is lost in every phase, on the larger grids that can still be explored: with deaths, joins, drains
and suspicions before it and after it, workers that it takes for dead and that run on, and the loss of its successor."""

from __future__ import annotations

from collections import defaultdict

import pytest

from parallel3d.parallel.grid import Grid
from tests.elastic.test_protocol_travel import ForgetsTheFirstCommit, ResumesFromAnyone
from tests.support.protocol_model import Model
from tests.support.protocol_search import explore
from tests.support.protocol_steps import uniform
from tests.support.protocol_takeover import TakeoverModel
from tests.support.protocol_world import (
    ABORTED,
    CONFIRMED,
    DEAD,
    DONE,
    LEFT,
    MISSING,
    RESOLVED,
    RUN,
    Violation,
    Worker,
    World,
)

PHASES = {LEFT, RUN, ABORTED, RESOLVED, CONFIRMED, DONE}


class NotesPhases(TakeoverModel):
    """Keeps the phases of the workers in all worlds in which the coordinator is lost."""

    def __init__(self, grid: Grid, *, num_iterations: int):
        super().__init__(grid, num_iterations=num_iterations)
        self.phases: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        """By the coordinators that may still be lost, and the dead workers."""

    def _take_over(self, world: World, *, keeps_frames: bool, late: tuple[int, ...] = ()) -> World:
        modes = [worker.mode for worker in world.workers]
        self.phases[world.takeovers, modes.count(DEAD)].update(modes)
        return super()._take_over(world, keeps_frames=keeps_frames, late=late)


@pytest.mark.sample(1, rest=3)
@pytest.mark.parametrize(
    ("grid", "num_iterations", "faults", "min_worlds"),
    [
        (uniform(2, 2), 1, {"takeovers": 1}, 2_500),
        pytest.param(uniform(2, 2), 2, {"takeovers": 1, "deaths": 1}, 100_000, marks=pytest.mark.full),
        pytest.param(uniform(2, 2), 1, {"takeovers": 1, "deaths": 2}, 100_000, marks=pytest.mark.full),
        pytest.param(uniform(2, 2), 1, {"takeovers": 2, "deaths": 1}, 200_000, marks=pytest.mark.full),
        pytest.param(uniform(1, 4), 1, {"takeovers": 1, "deaths": 2}, 100_000, marks=pytest.mark.full),
        pytest.param(uniform(2, 3), 1, {"takeovers": 1}, 30_000, marks=pytest.mark.full),
        pytest.param(uniform(1, 3), 1, {"takeovers": 2, "deaths": 1, "joins": 1}, 400_000, marks=pytest.mark.full),
        pytest.param(uniform(1, 4), 1, {"takeovers": 1, "deaths": 1, "joins": 1}, 300_000, marks=pytest.mark.full),
        pytest.param(uniform(2, 2), 1, {"takeovers": 1, "joins": 1}, 20_000, marks=pytest.mark.full),
        pytest.param(uniform(2, 2), 1, {"takeovers": 1, "suspicions": 1}, 80_000, marks=pytest.mark.full),
        pytest.param(uniform(2, 2), 1, {"takeovers": 1, "drains": 1}, 70_000, marks=pytest.mark.full),
    ],
)
def test_a_successor_in_every_phase(grid: Grid, num_iterations: int, faults: dict[str, int], min_worlds: int):
    model = NotesPhases(grid, num_iterations=num_iterations)
    found = explore(model, model.start(**{"deaths": 0, **faults}))
    assert found.ends.keys() == {"released", "halted"} and found.num_worlds >= min_worlds
    for left in range(1, faults["takeovers"] + 1):
        by_deaths = [model.phases[left, num_dead] for num_dead in range(faults.get("deaths", 0) + 1)]
        expected = PHASES if left == faults["takeovers"] else PHASES - {LEFT}  # no successor sees the start
        assert all(by_deaths) and set.union(*by_deaths) >= expected


@pytest.mark.parametrize(
    ("model_type", "faults", "wrong"),
    [
        (ForgetsTheFirstCommit, {"takeovers": 1}, "the ranges of generation -1"),
        (ResumesFromAnyone, {"takeovers": 1, "deaths": 1}, "wrongly after a takeover"),
    ],
)
def test_a_wrong_rule_of_a_successor_is_found_here_too(
    model_type: type[TakeoverModel], faults: dict[str, int], wrong: str
):
    """With the reduction. It leaves out frames that arrive late: numbers that are used again are found without it."""
    model = model_type(uniform(2, 2), num_iterations=1)
    with pytest.raises(Violation, match=wrong):
        explore(model, model.start(**{"deaths": 0, **faults}))


class NotesReturns(TakeoverModel):
    """Keeps what became of workers that the lost coordinator had taken for dead."""

    def __init__(self, grid: Grid, *, num_iterations: int, max_replicas: int | None = None):
        super().__init__(grid, num_iterations=num_iterations, max_replicas=max_replicas)
        self.returns: set[str] = set()

    def _take_over(self, world: World, *, keeps_frames: bool, late: tuple[int, ...] = ()) -> World:
        after = super()._take_over(world, keeps_frames=keeps_frames, late=late)
        protocol = self.protocol(after)
        for rank, worker in enumerate(world.workers):
            if worker.evicted and worker.alive and not after.ended and rank not in late:
                held = self._grid_of(after).holds(rank)
                self.returns.add("out" if rank not in protocol.live else "member" if held else "new")
                is_newest = worker.position > max((w.position for w in world.workers if not w.evicted), default=0)
                self.returns |= {"newest"} if is_newest and held else set()
        return after

    def _grid_of(self, world: World) -> Grid:
        committed = self.protocol(world).committed
        assert committed is not None
        return committed.grid


FALSE_DEATH = {"takeovers": 1, "false_deaths": 1}


@pytest.mark.parametrize(
    ("grid", "num_iterations", "faults", "returns"),
    [
        (uniform(1, 2), 1, {}, {"member", "out", "newest"}),
        pytest.param(uniform(1, 2), 2, {"deaths": 1}, {"member", "out", "newest"}, marks=pytest.mark.full),
        pytest.param(uniform(1, 3), 1, {"deaths": 1}, {"member", "out", "newest"}, marks=pytest.mark.full),
        pytest.param(uniform(1, 2), 1, {"joins": 1}, {"member", "new", "out", "newest"}, marks=pytest.mark.full),
        pytest.param(uniform(1, 1), 2, {"joins": 1}, {"member", "new", "out", "newest"}, marks=pytest.mark.full),
    ],
)
def test_a_worker_that_was_taken_for_dead_meets_the_successor(
    grid: Grid, num_iterations: int, faults: dict[str, int], returns: set[str]
):
    """It is a member again, with the newest entry that no other one may have, or stays out, or joins as a new one."""
    model = NotesReturns(grid, num_iterations=num_iterations, max_replicas=max(2, len(grid.ranks)))
    found = explore(model, model.start(**{"deaths": 0, **FALSE_DEATH, **faults}))
    assert found.ends.keys() == {"released", "halted"} and model.returns == returns


class MissesTheLate(TakeoverModel):
    """The successor waits for members that it does not hear of."""

    def lost_members(self, world: World, live: frozenset[int]) -> tuple[int, ...]:
        return tuple(rank for rank in sorted(live) if not world.workers[rank].alive)


class DropsGradients(Model):
    """A worker that has brought its ranges to a proposed record needs its gradients no more."""

    def _resolve(self, rank: int, worker: Worker, number: int, has_entries: bool) -> Worker:
        return super()._resolve(rank, worker, number, has_entries)._replace(own=False, back=False)


class DropsGradientsEarly(DropsGradients, TakeoverModel):
    pass


class KeepsOldRanges(TakeoverModel):
    """A worker keeps each range that it has, whether or not it holds it by the committed shard map."""

    def _confirm(self, world: World, rank: int, worker: Worker) -> Worker:
        confirmed = super()._confirm(world, rank, worker)
        ranges = zip(worker.held, confirmed.new)
        kept = tuple(old if MISSING not in (old, version) else version for old, version in ranges)
        return confirmed._replace(new=kept or confirmed.new)


@pytest.mark.parametrize(
    ("model_type", "grid", "max_replicas", "faults", "wrong"),
    [
        (MissesTheLate, uniform(1, 2), None, FALSE_DEATH, "rank 1 holds the ranges of generation -1"),
        (DropsGradientsEarly, uniform(1, 2), None, FALSE_DEATH, "lacks gradients of 1"),
        (KeepsOldRanges, uniform(1, 1), 2, {**FALSE_DEATH, "joins": 1}, r"ends at 2 with versions \(1, 1\)"),
    ],
)
def test_a_wrong_rule_for_a_worker_that_was_taken_for_dead_is_found(
    model_type: type[TakeoverModel], grid: Grid, max_replicas: int | None, faults: dict[str, int], wrong: str
):
    model = model_type(grid, num_iterations=2, max_replicas=max_replicas)
    with pytest.raises(Violation, match=wrong):
        explore(model, model.start(**{"deaths": 0, **faults}))


@pytest.mark.parametrize(
    ("model_type", "faults"),
    [(DropsGradients, {"false_deaths": 1}), (DropsGradientsEarly, {"takeovers": 1, "deaths": 1})],
)
def test_gradients_of_before_matter_only_to_a_worker_that_comes_back(model_type: type[Model], faults: dict[str, int]):
    model = model_type(uniform(1, 2), num_iterations=1)
    assert "released" in explore(model, model.start(**{"deaths": 0, **faults})).ends
