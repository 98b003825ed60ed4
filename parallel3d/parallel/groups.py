"""Builds the groups of one rank for one membership generation, from the grid. The only place where groups are built.

The names contain the generation, so that ranks of an old one can't meet ranks of a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from parallel3d.parallel.device_links import Pair, PairGroup
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.group import Closable

G = TypeVar("G", bound=Closable)
MakeGroup = Callable[[str, tuple[int, ...]], G]
MakePair = Callable[[str, Pair], PairGroup]


@dataclass(frozen=True, kw_only=True)
class Groups(Generic[G]):
    """The groups of one rank.

    tp: the ranks of this replica. dp: the ranks that hold the same parameters. world: every rank of the grid.
    embedding: the ranks of the first and the last stage that share a tied embedding, if these are two stages.
    pairs: by (sender, receiver), communicators with the neighbouring stages, where these talk from device to device.
    """

    tp: G
    dp: G
    world: G
    embedding: G | None = None
    pairs: Mapping[Pair, PairGroup] = field(default_factory=dict)

    @property
    def tied(self) -> G:
        """The ranks that hold the same part of a tied embedding, for a rank that has one."""
        return self.dp if self.embedding is None else self.embedding

    def abort(self) -> None:
        """Begins to abort what is under way in any of them."""
        for group in self.all:
            group.abort()

    @property
    def is_busy(self) -> bool:
        """True while a collective may still write to weights or gradients; the world group never does."""
        return any(group.is_busy for group in self.all if group is not self.world)

    def close(self, keep: Iterable[Groups[G]] = ()) -> None:
        """Closes those that are not in `keep`, too."""
        kept = [group for groups in keep for group in groups.all]
        for group in self.all:
            if not any(group is other for other in kept):
                group.close()

    @property
    def all(self) -> tuple[Closable, ...]:
        embedding = [] if self.embedding is None else [self.embedding]
        return (self.tp, self.dp, self.world, *embedding, *self.pairs.values())


def build_groups(
    grid: Grid,
    rank: int,
    generation: int,
    make_group: MakeGroup[G],
    *,
    tied: bool,
    make_pair: MakePair | None = None,
    borders: Iterable[tuple[int, int]] = (),
) -> Groups[G]:
    """Builds this rank's groups with `make_group(name, global ranks)`, in the same order on every rank.

    `tied`: the first and the last stage share an embedding. `make_pair` builds the communicators between the stages of
    `borders`; None: these talk over the host's links.
    """
    coordinates = grid.coordinates(rank)
    has_embedding = tied and grid.pp_size > 1 and coordinates.pp in grid.embedding_stages
    return Groups(
        world=make_group(f"generation{generation}/world", grid.ranks),
        dp=make_group(
            f"generation{generation}/dp/stage{coordinates.pp}/tp{coordinates.tp}",
            grid.dp_ranks(coordinates.pp, coordinates.tp),
        ),
        embedding=make_group(
            f"generation{generation}/embedding/tp{coordinates.tp}", grid.embedding_ranks(coordinates.tp)
        )
        if has_embedding
        else None,
        tp=make_group(
            f"generation{generation}/tp/stage{coordinates.pp}/replica{coordinates.dp}",
            grid.tp_ranks(coordinates.replica),
        ),
        pairs={}
        if make_pair is None
        else {
            pair: make_pair(f"generation{generation}/pair/{pair[0]}-{pair[1]}", pair)
            for pair in neighbour_pairs(grid, rank, borders)
        },
    )


def neighbour_pairs(grid: Grid, rank: int, borders: Iterable[tuple[int, int]]) -> tuple[Pair, ...]:
    """The ordered pairs (sender, receiver) of `rank` with the ranks at its place in neighbouring stages, for which
    `borders` are the pairs of stages; in an order in which all ranks can connect, even stages first."""
    own = grid.coordinates(rank)
    pairs = []
    for border in borders:
        ends = [grid.stages[stage].get(own.dp) for stage in border]
        if own.pp in border and ends[0] is not None and ends[1] is not None:
            first, second = ends[0][own.tp], ends[1][own.tp]
            pairs += [(min(border) % 2, first, second), (min(border) % 2, second, first)]
    return tuple((sender, receiver) for _, sender, receiver in sorted(pairs))


def collective_groups(grid: Grid) -> frozenset[tuple[int, ...]]:
    """The ranks of every group that can exist in a grid, but for that of all ranks."""
    lists = grid.groups()
    embeddings = [grid.embedding_ranks(tp) for tp in range(grid.tp_size)] if grid.pp_size > 1 else []
    return frozenset([*lists["tp"], *lists["dp"], *embeddings])


def is_world(name: str) -> bool:
    """Returns True for the name of a group of all ranks, which only reduces host tensors, even if weights are on a
    device: the iteration's one all-reduce carries numbers that every rank has read from its device by then."""
    return name.endswith("/world")


def may_stand_still(name: str) -> bool:
    """Returns True for the name of a group whose collectives may stand still between a call and its wait: no rank waits
    there for what a peer does after its own wait. Layers that sum over a tensor-parallel group only compute in between.
    Gradients are waited for when a rank has done all else of an iteration, and weights right after the update."""
    return name.split("/")[1] in ("tp", "dp")
