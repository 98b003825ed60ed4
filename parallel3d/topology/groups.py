"""Grid -> the groups that one rank belongs to, for one membership epoch. The only place where groups are made.

The names carry the epoch, so that nothing of an old one can meet anything of a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from parallel3d.topology.grid import Grid


class Closable(Protocol):
    def abandon(self) -> None: ...

    @property
    def is_busy(self) -> bool: ...

    def close(self) -> None: ...


G = TypeVar("G", bound=Closable)
MakeGroup = Callable[[str, tuple[int, ...]], G]


@dataclass(frozen=True, kw_only=True)
class Groups(Generic[G]):
    """tp: the ranks of this replica; dp: the ranks that hold the same parameters; world: every rank of the grid."""

    tp: G
    dp: G
    world: G

    def abandon(self) -> None:
        """Begins to end whatever is under way in any of them."""
        for group in (self.tp, self.dp, self.world):
            group.abandon()

    @property
    def is_busy(self) -> bool:
        """Whether something under way may still write into weights or gradients: the world's group never does."""
        return self.tp.is_busy or self.dp.is_busy

    def close(self) -> None:
        for group in (self.tp, self.dp, self.world):
            group.close()


def build_groups(grid: Grid, rank: int, epoch: int, make_group: MakeGroup[G]) -> Groups[G]:
    """Makes this rank's groups through `make_group(name, global ranks)`, in the same order on every rank."""
    place = grid.coordinates(rank)
    return Groups(
        world=make_group(f"epoch{epoch}/world", grid.ranks),
        dp=make_group(f"epoch{epoch}/dp/stage{place.pp}/tp{place.tp}", grid.dp_ranks(place.pp, place.tp)),
        tp=make_group(f"epoch{epoch}/tp/stage{place.pp}/replica{place.dp}", grid.tp_ranks(place.replica)),
    )


def is_world(name: str) -> bool:
    """Whether this is the name of a group of all ranks, which is given numbers of the host alone, wherever tensors are:
    the iteration's one all-reduce is of what every rank has read from its device by then."""
    return name.endswith("/world")
