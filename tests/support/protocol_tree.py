"""The membership protocol's model with a step's agreement that moves over the tree of all ranks."""

from __future__ import annotations

from parallel3d.parallel.tree_place import TreePlace, tree_place
from tests.support.protocol_model import Model
from tests.support.protocol_world import Worker, World


class TreeModel(Model):
    """A rank holds the sum once its parent in the tree does, the root once all have contributed.

    `Model` lets any rank come first, so it has all of these worlds and more. Here the holders are always the upper part
    of the tree: with a death, the newest entry may be left in one branch of it alone.
    """

    def has_sum(self, world: World, rank: int, worker: Worker, iteration: int) -> bool:
        parent = self.place(worker.run, rank).parent
        if parent is not None:
            return self._reached(world, worker, self.neighbours(worker.run)[parent], 4 * iteration + 2)
        return self.has_passed_up(world, worker, rank, iteration)

    def has_passed_up(self, world: World, worker: Worker, rank: int, iteration: int) -> bool:
        """Whether a rank and all below it have contributed; `worker` is one of the generation."""
        ranks = self.neighbours(worker.run)
        return self._has_contributed(world, worker, rank, iteration) and all(
            self.has_passed_up(world, worker, ranks[child], iteration)
            for child in self.place(worker.run, rank).children
        )

    def neighbours(self, run: int) -> tuple[int, ...]:
        """The ranks by their numbers in the group."""
        return self.record(run).grid.ranks

    def place(self, run: int, rank: int) -> TreePlace:
        ranks = self.neighbours(run)
        return tree_place(ranks.index(rank), len(ranks))
