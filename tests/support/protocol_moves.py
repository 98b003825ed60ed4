"""The membership protocol's model with spares that are asked to build another part."""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.protocol_model import Model
from tests.support.protocol_world import Frame, Step, World


class MovesModel(Model):
    """Any spare may be asked to build any other part, even where the protocol would not choose to."""

    def is_taken_at_once(self, world: World, frame: Frame) -> bool:
        """Building takes its time, in which the others go on."""
        return super().is_taken_at_once(world, frame) and frame[0] != "build_part"

    def _faults(self, world: World) -> Iterator[Step]:
        yield from super()._faults(world)
        yield from self._moves_of_spares(world)

    def _moves_of_spares(self, world: World) -> Iterator[Step]:
        protocol = self.protocol(world)
        if not world.moves or protocol.pending is not None or protocol.over:
            return
        for rank in sorted((protocol.live | protocol._ready) - protocol._draining):
            if not protocol._grid.holds(rank):
                for part in sorted({self.grid.part(first) for first in self.grid.ranks} - {protocol._parts[rank]}):
                    yield f"rank {rank} moves to {part}", lambda r=rank, p=part: self._move(world, r, p)

    def _move(self, world: World, rank: int, part: tuple[int, int]) -> World:
        """The coordinator lets a spare go, which comes back with another part."""
        world = self._submit(world._replace(moves=world.moves - 1), ("release", rank))
        return self._send(world, (rank,), ("build_part", part))
