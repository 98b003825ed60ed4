"""Wires one rank: from the configuration, its place in the grid and its transports to something that can step.

The only place that wires. It is given what differs between worlds (groups, links, the model's constructor, the lanes),
so that threads of one process, gloo processes and a single process are built by the same lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from parallel3d.comm.abort import AbortToken
from parallel3d.comm.group import Group
from parallel3d.comm.messages import Links
from parallel3d.comm.tensor_parallel import TensorParallel
from parallel3d.config.derived import num_key_value_heads, stage_replicas
from parallel3d.config.schema import Config
from parallel3d.data.lanes import Lanes
from parallel3d.layers.micro_batch import BatchPlan
from parallel3d.optim.zero1 import AdamWSettings, ShardedOptimizer
from parallel3d.pipeline.executor import Executor, Observer
from parallel3d.pipeline.partition import ModelCosts, model_costs, partition_by_hand, partition_layers
from parallel3d.pipeline.planner import Plan, PlanRequest, Rule, plan_pipeline
from parallel3d.precision.policy import POLICIES
from parallel3d.ramps import Ramp
from parallel3d.topology.grid import Coordinates, Grid
from parallel3d.topology.groups import Groups, build_groups
from parallel3d.trainer.entry import EntryLayout
from parallel3d.trainer.loader import EvaluationSequences, LaneLoader, Reader

MakeStage = Callable[[Config, range, TensorParallel, torch.device], nn.Module]
"""The model's constructor: configuration, layers of this stage, tensor-parallel region, device."""


@dataclass(frozen=True, kw_only=True)
class Transports:
    """How a rank reaches the others in one membership epoch."""

    make_group: Callable[[str, tuple[int, ...]], Group]
    links: Links
    token: AbortToken


@dataclass(kw_only=True)
class RankRuntime:
    """One rank, ready to run iterations of one membership epoch."""

    config: Config
    rank: int
    grid: Grid
    groups: Groups[Group]
    stage: nn.Module
    executor: Executor
    optimizer: ShardedOptimizer
    train_plan: Plan
    evaluate_plan: Plan
    train_loader: LaneLoader
    evaluate_loader: LaneLoader | None
    layout: EntryLayout
    learning_rate: Ramp

    @property
    def place(self) -> Coordinates:
        return self.grid.coordinates(self.rank)

    @property
    def is_leader(self) -> bool:
        """The lowest live rank of the grid speaks for all."""
        return self.rank == self.grid.ranks[0]

    def train_batch(self, iteration: int) -> BatchPlan:
        return plan_batch(self.config, iteration)

    def close(self) -> None:
        self.executor.links.close()
        self.groups.close()


def build_grid(config: Config) -> Grid:
    """The grid that the configuration asks for."""
    return Grid.of_replicas(stage_replicas(config), tp_size=config.parallel.tp_size, order=config.parallel.order)


def plan_batch(config: Config, iteration: int) -> BatchPlan:
    """The batch of one iteration; keyed by the iteration alone."""
    assert config.batch.num_micro_batches is not None and config.batch.micro_batch_size is not None
    return BatchPlan(
        seed=config.run.seed,
        iteration=iteration,
        num_micro_batches=config.batch.num_micro_batches,
        micro_batch_size=config.batch.micro_batch_size,
        sequence_length=config.batch.sequence_length,
    )


def plan_schedule(config: Config, grid: Grid, rule: Rule, num_micro_batches: int) -> Plan:
    """The instruction lists for the replicas that are there; a backward pass costs twice its forward pass."""
    return plan_pipeline(
        PlanRequest(
            replicas=grid.replicas,
            num_micro_batches=num_micro_batches,
            rule=rule,
            forward_costs=(1,) * grid.pp_size,
            backward_costs=(2,) * grid.pp_size,
            slots=config.parallel.p2p_slots,
        )
    )


def split_layers(config: Config) -> tuple[range, ...]:
    """The layers of each stage: by hand, or balanced by cost with the embedding and the head weighed in."""
    if config.parallel.layers_per_stage is not None:
        return partition_by_hand(config.parallel.layers_per_stage)
    costs = costs_of(config)
    layers = [costs.layer] * config.model.num_hidden_layers
    return partition_layers(layers, config.parallel.pp_size, costs.embedding, costs.head)


def costs_of(config: Config) -> ModelCosts:
    """What a token costs in the model's parts, for the cut and for whoever explains it."""
    model = config.model
    return model_costs(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=num_key_value_heads(model),
        vocab_size=model.vocab_size,
        sequence_length=config.batch.sequence_length,
    )


def build_rank(
    config: Config,
    rank: int,
    grid: Grid,
    *,
    epoch: int,
    transports: Transports,
    make_stage: MakeStage,
    train_lanes: Reader,
    evaluate_lanes: Lanes | None,
    device: torch.device,
    observe: Observer = lambda instruction: None,
) -> RankRuntime:
    """Builds this rank's groups, layers with their initial weights, optimizer shards and instruction lists."""
    parallel, place, policy = config.parallel, grid.coordinates(rank), POLICIES[config.precision.policy]
    batch = plan_batch(config, 0)
    groups = build_groups(grid, rank, epoch, transports.make_group)
    tp = TensorParallel(group=groups.tp, sequence_parallel=parallel.sequence_parallel)
    stage = make_stage(config, split_layers(config)[place.pp], tp, device)
    optimizer = ShardedOptimizer(
        stage,
        seed=config.run.seed,
        tp=groups.tp,
        dp=groups.dp,
        zero_stage=parallel.zero_stage,
        bucket_bytes=int(parallel.bucket_mib * 2**20),
        decay_norms_and_biases=config.optimizer.decay_norms_and_biases,
        policy=policy,
        settings=AdamWSettings(
            beta1=config.optimizer.beta1,
            beta2=config.optimizer.beta2,
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
        ),
        overlap_reduce=parallel.overlap_grad_reduce,
        overlap_gather=parallel.overlap_param_gather,
        device=device,
    )
    executor = Executor(
        stage=stage,
        grid=grid,
        rank=rank,
        epoch=epoch,
        links=transports.links,
        tp=tp,
        hidden_size=config.model.hidden_size,
        dtype=policy.compute,
        device=device,
        token=transports.token,
        observe=observe,
    )
    return RankRuntime(
        config=config,
        rank=rank,
        grid=grid,
        groups=groups,
        stage=stage,
        executor=executor,
        optimizer=optimizer,
        train_plan=plan_schedule(config, grid, parallel.schedule, batch.num_micro_batches),
        evaluate_plan=plan_schedule(config, grid, "forward", config.run.evaluate_batches * batch.num_micro_batches),
        train_loader=LaneLoader(train_lanes, device),
        evaluate_loader=LaneLoader(EvaluationSequences(evaluate_lanes), device) if evaluate_lanes else None,
        layout=EntryLayout(
            num_stages=grid.pp_size, num_micro_batches=batch.num_micro_batches, num_slots=batch.num_slots
        ),
        learning_rate=build_learning_rate(config),
    )


def build_learning_rate(config: Config) -> Ramp:
    """The learning rate by number of updates."""
    schedule = config.schedule
    return Ramp(
        peak=config.optimizer.learning_rate,
        kind=schedule.kind,
        warmup=schedule.warmup_steps,
        decay_end=schedule.decay_steps or config.run.num_steps,
        min_ratio=schedule.min_ratio,
        form=schedule.decay_form,
    )
