"""Ranks that hold a trained model and only compute, as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import nn

from parallel3d.config.schema import Config
from parallel3d.decoding.rank_decoder import ModelStage, PipelinePlace
from parallel3d.inprocess.harness import MAX_RUN_S
from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.kernels.c_loops import has_c_loops
from parallel3d.layers.gemm import Gemm
from parallel3d.layers.init import InitMethod
from parallel3d.layers.parameter import parameters_of
from parallel3d.parallel.grid import Coordinates, Grid
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.precision.policy import policy_of
from parallel3d.trainer.build import MakeStage
from parallel3d.trainer.plans import build_grid, split_layers
from parallel3d.worker.device import choose_num_threads

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LoadedRank:
    """One rank with its part of the model."""

    coordinates: Coordinates
    num_replicas: int
    stage: ModelStage
    place: PipelinePlace

    @property
    def is_first_of_copy(self) -> bool:
        """Whether it is the one that reports for its copy of the model."""
        return self.coordinates.pp == self.coordinates.tp == 0


def run_loaded_ranks(
    config: Config,
    body: Callable[[LoadedRank], T],
    *,
    make_stage: MakeStage,
    initial: InitMethod,
    device: torch.device,
) -> list[T]:
    """Returns the results of `body` by rank, each of which has read its share of the weights by `initial`."""
    grid, policy = build_grid(config), policy_of(config.precision)
    num_ranks, partition = len(grid.ranks), split_layers(config)
    gemm = Gemm(kernels="c" if device.type == "cpu" and has_c_loops() else "torch")
    torch.set_num_threads(choose_num_threads(config, num_ranks))  # for threads started later

    def run_rank(rank: int, world: ThreadWorld) -> T:
        torch.set_flush_denormal(True)
        coordinates = grid.coordinates(rank)
        group = world.make_group(rank)(f"tp-{coordinates.pp}-{coordinates.dp}", grid.tp_ranks(coordinates.replica))
        tp = TensorParallel(group=group)
        stage = make_stage(config, partition[coordinates.pp], tp, device, gemm=gemm)
        load_weights(stage, initial, tp)
        place = PipelinePlace(
            stage=coordinates.pp,
            ranks=pipeline_ranks(grid, coordinates),
            links=world.links(rank),
            hidden_size=config.model.hidden_size,
            dtype=policy.compute,
            device=device,
        )
        loaded = cast(ModelStage, stage.eval())
        return body(LoadedRank(coordinates=coordinates, num_replicas=len(grid.stages[0]), stage=loaded, place=place))

    return run_threads(num_ranks, run_rank, world=ThreadWorld(num_ranks), timeout_s=MAX_RUN_S)


def pipeline_ranks(grid: Grid, coordinates: Coordinates) -> tuple[int, ...]:
    """The ranks of all stages with the same copy of the model and tensor-parallel part."""
    return tuple(grid.stages[stage][coordinates.dp][coordinates.tp] for stage in range(grid.pp_size))


@torch.no_grad()
def load_weights(stage: nn.Module, initial: InitMethod, tp: TensorParallel) -> None:
    """Fills a stage's parameters, which get no gradients."""
    for parameter in parameters_of(stage):
        parameter.copy_(initial(parameter.sharding, tp=tp.shard))
        parameter.requires_grad_(False)
