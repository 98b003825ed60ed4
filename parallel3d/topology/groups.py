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
    """tp: the ranks of this replica; dp: the ranks that hold the same parameters; world: every rank of the grid; ends:
    the ranks of the first and of the last stage that share a tied embedding, if these are two stages."""

    tp: G
    dp: G
    world: G
    ends: G | None = None

    @property
    def tied(self) -> G:
        """The ranks that hold the same part of a tied embedding; asked of a rank that has one."""
        return self.dp if self.ends is None else self.ends

    def abandon(self) -> None:
        """Begins to end whatever is under way in any of them."""
        for group in self._all:
            group.abandon()

    @property
    def is_busy(self) -> bool:
        """Whether something under way may still write into weights or gradients: the world's group never does."""
        return any(group.is_busy for group in self._all if group is not self.world)

    def close(self) -> None:
        for group in self._all:
            group.close()

    @property
    def _all(self) -> tuple[G, ...]:
        return (self.tp, self.dp, self.world, *([] if self.ends is None else [self.ends]))


def build_groups(grid: Grid, rank: int, epoch: int, make_group: MakeGroup[G], *, tied: bool) -> Groups[G]:
    """Makes this rank's groups through `make_group(name, global ranks)`, in the same order on every rank.

    `tied`: the first stage and the last share an embedding.
    """
    place = grid.coordinates(rank)
    has_ends = tied and grid.pp_size > 1 and place.pp in grid.ends
    return Groups(
        world=make_group(f"epoch{epoch}/world", grid.ranks),
        dp=make_group(f"epoch{epoch}/dp/stage{place.pp}/tp{place.tp}", grid.dp_ranks(place.pp, place.tp)),
        ends=make_group(f"epoch{epoch}/ends/tp{place.tp}", grid.end_ranks(place.tp)) if has_ends else None,
        tp=make_group(f"epoch{epoch}/tp/stage{place.pp}/replica{place.dp}", grid.tp_ranks(place.replica)),
    )


def is_world(name: str) -> bool:
    """Whether this is the name of a group of all ranks, which is given numbers of the host alone, wherever tensors are:
    the iteration's one all-reduce is of what every rank has read from its device by then."""
    return name.endswith("/world")
