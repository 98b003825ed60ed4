"""A coordinator that is lost in every phase, on the larger grids that can still be explored: with deaths, joins, drains
and suspicions before it and after it, and the loss of its successor."""

from __future__ import annotations

from collections import defaultdict

import pytest

from parallel3d.parallel.grid import Grid
from tests.elastic.test_protocol_travel import ForgetsTheFirstCommit, ResumesFromAnyone
from tests.support.protocol_search import explore
from tests.support.protocol_steps import uniform
from tests.support.protocol_takeover import TakeoverModel
from tests.support.protocol_world import ABORTED, CONFIRMED, DEAD, DONE, LEFT, RESOLVED, RUN, Violation, World

PHASES = {LEFT, RUN, ABORTED, RESOLVED, CONFIRMED, DONE}


class NotesPhases(TakeoverModel):
    """Keeps the phases of the workers in all worlds in which the coordinator is lost."""

    def __init__(self, grid: Grid, *, num_iterations: int):
        super().__init__(grid, num_iterations=num_iterations)
        self.phases: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        """By the coordinators that may still be lost, and the dead workers."""

    def _take_over(self, world: World, *, keeps_frames: bool) -> World:
        modes = [worker.mode for worker in world.workers]
        self.phases[world.takeovers, modes.count(DEAD)].update(modes)
        return super()._take_over(world, keeps_frames=keeps_frames)


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
