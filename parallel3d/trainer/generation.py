"""Brings a rank into a membership generation and out of it."""

from __future__ import annotations

from collections.abc import Mapping

from parallel3d.config.schema import Config
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.optim.reshard import ReshardPlan
from parallel3d.optim.shard_map import ShardMaps, plan_shard_maps
from parallel3d.parallel.device_links import DeviceLinks
from parallel3d.parallel.grid import Coordinates, Grid
from parallel3d.parallel.group import AbsentGroup, Group
from parallel3d.parallel.groups import Groups, build_groups
from parallel3d.pipeline.executor import Executor
from parallel3d.precision.policy import policy_of
from parallel3d.trainer.context import Generation, RankContext, Transports
from parallel3d.trainer.plans import Plans, chunk_layout_of


def start_rank(rank: RankContext, grid: Grid, transports: Transports, *, number: int = 0) -> None:
    """Begins a run whose membership never changes: no coordinator, no generation record."""
    new = shard_maps_of(rank.config, rank.coordinates, grid, hosts={})
    rank.optimizer.reshard(ReshardPlan(generation=number, old=None, new=new, live=grid.ranks), transports.links)
    rank.optimizer.commit()
    groups = build_rank_groups(rank, grid, number, transports)
    record = GenerationRecord(generation=number, grid=grid, previous=None, members=grid.ranks)
    join_generation(rank, number, groups, Plans(rank.config, grid), transports, leader=record.leader)
    if not rank.optimizer.is_gathered:  # the run was resumed from a checkpoint
        rank.optimizer.gather()


def join_generation(
    rank: RankContext, number: int, groups: Groups[Group], plans: Plans, transports: Transports, *, leader: int
) -> None:
    """Makes `rank` a member of generation `number`, whose grid (`plans.grid`) holds it."""
    rank.coordinates = plans.grid.coordinates(rank.rank)
    rank.tp.group = groups.tp
    rank.optimizer.join(number, groups, transports.links)
    links = transports.links
    if groups.pairs:
        links = DeviceLinks(links, groups.pairs, rank=rank.rank, device=rank.device)
    executor = Executor(
        chunks=list(rank.chunks),
        layout=rank.chunk_layout,
        grid=plans.grid,
        rank=rank.rank,
        generation=number,
        links=links,
        tp=rank.tp,
        hidden_size=rank.config.model.hidden_size,
        dtype=policy_of(rank.config.precision).compute,
        device=rank.device,
        token=transports.token,
        weight_grads=rank.weight_grads,
        on_instruction=rank.hooks.on_instruction,
        clock=rank.clock,
        label=rank.hooks.label,
        after_compute=rank.optimizer.finalize_micro_batch_grads,
    )
    rank.generation = Generation(
        number=number,
        grid=plans.grid,
        leader=leader,
        groups=groups,
        links=transports.links,
        token=transports.token,
        executor=executor,
        plans=plans,
    )


def leave_generation(rank: RankContext) -> Groups[Group] | None:
    """Takes `rank` out of its generation and returns the groups, in which a collective may still be in flight."""
    generation, rank.generation = rank.generation, None
    rank.optimizer.leave()
    rank.tp.group = AbsentGroup(name="none", rank=rank.tp.group.rank, ranks=rank.tp.group.ranks)
    return generation.groups if generation else None


def close_generation(rank: RankContext) -> None:
    """Closes links and groups at the end of the run."""
    rank.current.links.close()
    rank.current.groups.close()


def build_rank_groups(rank: RankContext, grid: Grid, number: int, transports: Transports) -> Groups[Group]:
    """This rank's process groups in generation `number`."""
    tied = rank.config.model.tie_word_embeddings and len(rank.chunk_layout.embedding_stages) > 1
    return build_groups(
        grid,
        rank.rank,
        number,
        transports.make_group,
        tied=tied,
        make_pair=transports.make_pair,
        borders=rank.chunk_layout.borders,
    )


def shard_maps_of(config: Config, coordinates: Coordinates, grid: Grid, hosts: Mapping[int, str]) -> ShardMaps:
    """Owners and backups of each range of optimizer state at one stage and tensor-parallel rank."""
    return plan_shard_maps(
        grid,
        coordinates.pp,
        coordinates.tp,
        zero_stage=config.parallel.zero_stage,
        zero_backups=config.elastic.zero_backups,
        hosts=hosts,
        embedding_stages=chunk_layout_of(config).embedding_stages,
    )
