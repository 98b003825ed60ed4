"""The sum of a step's agreement, held by a node of the tree and not by its neighbour, explored: with a death, or with a
change that a worker asks for. And wrong rules for who holds the newest entry, which the exploration finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel3d.elastic.protocol.actions import Action, FetchEntries
from parallel3d.elastic.protocol.membership import StateReport
from parallel3d.elastic.protocol.state_machine import MembershipProtocol
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.tree_place import tree_place
from tests.elastic.test_protocol_worlds import decision
from tests.support.protocol_model import Model
from tests.support.protocol_search import explore
from tests.support.protocol_steps import uniform
from tests.support.protocol_tree import TreeModel
from tests.support.protocol_world import RUN, Frame, Violation, Worker, World


class NotesHolders(TreeModel):
    """Keeps who held the entry of the first step, and who did not, when a rank died."""

    def _kill(self, world: World, rank: int) -> World:
        if all(worker.mode == RUN for worker in world.workers):
            self.requests.add(("death", rank, *(worker.position for worker in world.workers)))
        return super()._kill(world, rank)


def holders_at_deaths(size: int) -> set[Frame]:
    """(rank that dies, ranks that hold the entry) of all deaths during a step: upper parts of the tree."""
    places = [tree_place(rank, size) for rank in range(size)]
    holders = {frozenset[int]()}
    for _ in range(size):
        holders |= {
            held | {rank}
            for held in holders
            for rank, place in enumerate(places)
            if place.parent is None or place.parent in held
        }
    return {(rank, held) for held in holders for rank in range(size)}


@pytest.mark.parametrize("grid", [uniform(1, 3), uniform(2, 2)])
def test_a_death_with_the_sum_in_any_upper_part_of_the_tree(grid: Grid):
    """Each set of holders that the tree can have, with each rank's death: also the root's while one branch alone holds
    the sum."""
    model = NotesHolders(grid, num_iterations=1)
    found = explore(model, model.start(deaths=1))
    assert "released" in found.ends
    seen = {
        (rank, frozenset(other for other, position in enumerate(positions) if position == 1))
        for kind, rank, *positions in model.requests
        if kind == "death"
    }
    assert seen == holders_at_deaths(len(grid.ranks))


@pytest.mark.sample(1, rest=2)
@pytest.mark.parametrize(
    ("grid", "num_iterations", "faults"),
    [
        (uniform(1, 3), 1, {"deaths": 1}),
        pytest.param(uniform(1, 3), 2, {"deaths": 1, "suspicions": 1}, marks=pytest.mark.full),
        pytest.param(uniform(2, 2), 2, {"deaths": 2}, marks=pytest.mark.full),
        pytest.param(uniform(1, 4), 1, {"deaths": 2}, marks=pytest.mark.full),
    ],
)
def test_every_way_over_the_tree(grid: Grid, num_iterations: int, faults: dict[str, int]):
    """Its decisions are among those of the model in which any rank may hold the sum first."""
    models = [kind(grid, num_iterations=num_iterations) for kind in (TreeModel, Model)]
    for model in models:
        assert "released" in explore(model, model.start(**{"deaths": 0, **faults})).ends
    of_the_tree, of_all = ({decision(record) for record in model.records} for model in models)
    assert of_the_tree <= of_all and models[0].reports <= models[1].reports


class CountsItsSubtree(TreeModel):
    """A node takes the sum of its own subtree for that of all."""

    def has_sum(self, world: World, rank: int, worker: Worker, iteration: int) -> bool:
        return self.has_passed_up(world, worker, rank, iteration)


class PassesUpEarly(TreeModel):
    """A node passes its part up before those of its children have come."""

    def has_passed_up(self, world: World, worker: Worker, rank: int, iteration: int) -> bool:
        place = self.place(worker.run, rank)
        below = place.children if place.parent is None else ()
        ranks = (rank, *(self.neighbours(worker.run)[child] for child in below))
        return all(self._has_contributed(world, worker, other, iteration) for other in ranks)


class FollowsTheRoot(MembershipProtocol):
    """Goes on from what the root of the tree reports, or the first rank that is left: it had the sum before all others,
    but the one that is left may not."""

    def _find_newest(self) -> StateReport:
        super()._find_newest()
        return self._reports[next(rank for rank in self._grid.ranks if rank in self._reports)]


class AsksTheRoot(MembershipProtocol):
    """Asks the first rank that is left for the newest entry, whether or not it holds it."""

    def _decide(self) -> list[Action]:
        actions = super()._decide()
        if self._lead is None:
            return actions
        first = next(rank for rank in self._grid.ranks if rank in self._reports)
        self._lead = replace(self._lead, rank=first)
        return [FetchEntries(rank=first, generation=self._generation)]


LACKS = "lacks gradients of"


@pytest.mark.parametrize(
    ("model_type", "protocol", "faults", "wrong"),
    [
        (CountsItsSubtree, MembershipProtocol, {"suspicions": 1}, LACKS),
        (PassesUpEarly, MembershipProtocol, {"suspicions": 1}, LACKS),
        (TreeModel, FollowsTheRoot, {"deaths": 1}, "would go back to"),
        (TreeModel, AsksTheRoot, {"deaths": 1}, "sent other entries than"),
    ],
)
def test_a_wrong_rule_is_found(
    model_type: type[TreeModel], protocol: type[MembershipProtocol], faults: dict[str, int], wrong: str
):
    model = model_type(uniform(2, 2), num_iterations=1, protocol=protocol)
    with pytest.raises(Violation, match=wrong):
        explore(model, model.start(**{"deaths": 0, **faults}))
