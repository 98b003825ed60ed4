"""The grid of ranks: stages, their replicas, and each replica's tensor-parallel ranks. Pure data.

A stage is a list of replicas, a replica is `tp_size` ranks. Stages may have different numbers of replicas, and a
replica keeps its id when others are lost, so that "(stage 1, replica 2)" means the same ranks for a whole run::

    Grid.uniform(tp_size=2, pp_size=2, dp_size=2)      after the loss of rank 5
        stage 0: replica 0 = 0 1   replica 1 = 2 3          0: 0 1   1: 2 3
        stage 1: replica 0 = 4 5   replica 1 = 6 7          1: 6 7              spare: 4
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

Order = Literal["pp_dp_tp", "dp_pp_tp"]
ReplicaId = tuple[int, int]  # (stage, replica)
PartId = tuple[int, int]  # (stage, tensor-parallel rank): a part of the model


@dataclass(frozen=True, kw_only=True, order=True)
class Coordinates:
    """A rank's stage, replica, and position in its tensor-parallel group."""

    pp: int
    dp: int
    tp: int

    def __str__(self) -> str:
        return f"pp{self.pp} dp{self.dp} tp{self.tp}"

    @property
    def replica(self) -> ReplicaId:
        return (self.pp, self.dp)


@dataclass(frozen=True)
class Grid:
    """`stages[p][d]` is the tuple of ranks, in tensor-parallel order, of replica (p, d)."""

    stages: tuple[Mapping[int, tuple[int, ...]], ...]

    @staticmethod
    def uniform(*, tp_size: int, pp_size: int, dp_size: int, order: Order = "pp_dp_tp") -> Grid:
        """Returns a grid with `dp_size` replicas of every stage.

        pp_dp_tp: rank = (pp * dp_size + dp) * tp_size + tp (HLAT, section II-B).
        """
        return Grid.of_replicas([dp_size] * pp_size, tp_size=tp_size, order=order)

    @staticmethod
    def of_replicas(stage_replicas: Iterable[int], *, tp_size: int, order: Order = "pp_dp_tp") -> Grid:
        """Returns a grid with `stage_replicas[p]` replicas of stage p; ranks are numbered densely in the given order.

        dp_pp_tp numbers a whole pipeline before the next, so that a host holds pipelines rather than stages.
        """
        counts = list(stage_replicas)
        replicas = [(p, d) for p, count in enumerate(counts) for d in range(count)]
        if order == "dp_pp_tp":
            replicas.sort(key=lambda replica: (replica[1], replica[0]))
        first = {replica: index * tp_size for index, replica in enumerate(replicas)}
        return Grid(
            tuple(
                MappingProxyType({d: tuple(range(first[p, d], first[p, d] + tp_size)) for d in range(count)})
                for p, count in enumerate(counts)
            )
        )

    @property
    def pp_size(self) -> int:
        return len(self.stages)

    @property
    def tp_size(self) -> int:
        return max(len(ranks) for stage in self.stages for ranks in stage.values())

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the grid, ascending."""
        return tuple(sorted(self._coordinates))

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ids of the replicas of each stage."""
        return tuple(tuple(sorted(stage)) for stage in self.stages)

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of `rank`; KeyError if it is not in the grid."""
        return self._coordinates[rank]

    def part(self, rank: int) -> PartId:
        """The part of the model that `rank` computes: its stage and tensor-parallel rank."""
        coordinates = self._coordinates[rank]
        return coordinates.pp, coordinates.tp

    def first_of(self, part: PartId) -> Coordinates:
        """The coordinates of the first rank that computes `part`."""
        return Coordinates(pp=part[0], dp=min(self.stages[part[0]]), tp=part[1])

    def holds(self, rank: int) -> bool:
        return rank in self._coordinates

    def rank_of(self, coordinates: Coordinates) -> int:
        return self.stages[coordinates.pp][coordinates.dp][coordinates.tp]

    def tp_ranks(self, replica: ReplicaId) -> tuple[int, ...]:
        """The ranks of one replica: its tensor-parallel group."""
        return self.stages[replica[0]][replica[1]]

    def dp_ranks(self, stage: int, tp: int) -> tuple[int, ...]:
        """The ranks that hold the same parameters: one per replica of the stage, in replica order."""
        return tuple(self.stages[stage][d][tp] for d in sorted(self.stages[stage]))

    @property
    def embedding_stages(self) -> tuple[int, ...]:
        """The stages that share a tied embedding, unless the chunk layout puts both of its ends on one stage."""
        return (0,) if self.pp_size == 1 else (0, self.pp_size - 1)

    def embedding_ranks(self, tp: int, stages: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The ranks that hold the same part of a tied embedding, stage by stage; `stages` replaces the usual ones."""
        return tuple(rank for stage in stages or self.embedding_stages for rank in self.dp_ranks(stage, tp))

    def groups(self) -> dict[str, list[tuple[int, ...]]]:
        """The rank lists of all groups by kind: tp, dp, and the one group of all ranks, "world"."""
        return {
            "tp": [self.tp_ranks((p, d)) for p, stage in enumerate(self.stages) for d in sorted(stage)],
            "dp": [self.dp_ranks(p, t) for p in range(self.pp_size) for t in range(self.tp_size)],
            "world": [self.ranks],
        }

    def without(self, lost: Iterable[int]) -> tuple[Grid, tuple[int, ...]]:
        """Returns the grid after the loss of some ranks, and the spares: live ranks of replicas that lost a rank.

        A stage may be left without replicas, see `stages_lost`.
        """
        gone = {rank for rank in lost if self.holds(rank)}
        broken = {self.coordinates(rank).replica for rank in gone}
        damaged_stages = {stage for stage, _ in broken}
        stages = tuple(
            MappingProxyType({d: ranks for d, ranks in stage.items() if (p, d) not in broken})
            if p in damaged_stages
            else stage
            for p, stage in enumerate(self.stages)
        )
        left = {rank for replica in broken for rank in self.tp_ranks(replica)}
        grid = Grid(stages)
        # The others keep their coordinates: at 10,000 ranks making them again takes longer than all else here.
        vars(grid)["_coordinates"] = {rank: self._coordinates[rank] for rank in self._coordinates if rank not in left}
        return grid, tuple(sorted(left - gone))

    def with_replica(self, replica: ReplicaId, ranks: tuple[int, ...]) -> Grid:
        """Returns the grid with one more replica."""
        stage, number = replica
        assert number not in self.stages[stage], f"stage {stage} has a replica {number}"
        wider = MappingProxyType({**self.stages[stage], number: ranks})
        return Grid((*self.stages[:stage], wider, *self.stages[stage + 1 :]))

    def stages_lost(self) -> tuple[int, ...]:
        """Stages that have no replica left."""
        return tuple(p for p, stage in enumerate(self.stages) if not stage)

    @cached_property
    def _coordinates(self) -> dict[int, Coordinates]:
        return {
            rank: Coordinates(pp=p, dp=d, tp=t)
            for p, stage in enumerate(self.stages)
            for d, ranks in stage.items()
            for t, rank in enumerate(ranks)
        }
