"""Wires one rank: from the configuration and its place in the grid to what it keeps, and, with the transports of a
membership generation, to something that can step.

The only place that wires. It is given what differs between worlds (groups, links, the model's constructor, the lanes),
so that threads of one process, gloo processes and a single process are built by the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from parallel3d.backends import Backend, choose_backend
from parallel3d.config.derived import num_key_value_heads, num_mlp_matrices, stage_replicas
from parallel3d.config.schema import Config
from parallel3d.config.warmup_builder import build_shape_schedule
from parallel3d.data.lanes import Lanes
from parallel3d.data.reader import Reader
from parallel3d.layers.init import InitMethod
from parallel3d.layers.micro_batch import BatchPlan
from parallel3d.monitor.divergence import Divergence, DivergenceRules
from parallel3d.monitor.flops import Peak
from parallel3d.monitor.training_monitor import TrainingMonitor
from parallel3d.optim import apex_adamw
from parallel3d.optim.adamw import AdamWSettings, UpdateStep
from parallel3d.optim.distributed_optimizer import PhaseHook, ReshardPlan, ShardedOptimizer
from parallel3d.optim.shard_map import ShardMaps, plan_shard_maps
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Coordinates, Grid
from parallel3d.parallel.group import AbsentGroup, Group
from parallel3d.parallel.groups import Groups, build_groups
from parallel3d.parallel.p2p_messages import Links
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.pipeline.executor import NO_LABEL, Executor, InstructionHook, Label
from parallel3d.pipeline.partition import (
    ModelCosts,
    model_costs,
    partition_from_counts,
    partition_layers,
    pass_costs,
)
from parallel3d.pipeline.planner import Plan, choose_plan
from parallel3d.pipeline.request import PipelineSchedule, PlanRequest
from parallel3d.precision.fixed_point import FixedPoint, plan_fixed_point
from parallel3d.precision.loss_scale import UNSCALED, LossScale
from parallel3d.precision.policy import policy_of
from parallel3d.ramps import LrSchedule
from parallel3d.size_schedule import BatchShape
from parallel3d.trainer.entry import EntryLayout, TrainState
from parallel3d.trainer.learning_rate import build_lr_schedule
from parallel3d.trainer.loader import EvaluationSequences, LaneLoader

MakeStage = Callable[[Config, range, TensorParallel, torch.device], nn.Module]
"""The model's constructor: configuration, layers of this stage, tensor-parallel region, device."""


@dataclass(frozen=True, kw_only=True)
class Transports:
    """How a rank reaches the others in one membership generation."""

    make_group: Callable[[str, tuple[int, ...]], Group]
    links: Links
    token: AbortToken


@dataclass(frozen=True)
class Plans:
    """The instruction lists for one grid, each made when it is first needed."""

    config: Config
    grid: Grid

    _train: dict[int, Plan] = field(default_factory=dict)

    def train(self, num_micro_batches: int) -> Plan:
        """For a step of so many micro-batches."""
        if num_micro_batches not in self._train:
            schedule = self.config.parallel.schedule
            self._train[num_micro_batches] = plan_schedule(self.config, self.grid, schedule, num_micro_batches)
        return self._train[num_micro_batches]

    @cached_property
    def evaluate(self) -> Plan:
        num_micro_batches = plan_batch(self.config, 0).num_micro_batches * self.config.run.evaluate_batches
        return plan_schedule(self.config, self.grid, "forward", num_micro_batches)


@dataclass(frozen=True, kw_only=True)
class GenerationParts:
    """What a rank has for one membership generation, and lets go of with it."""

    generation: int
    grid: Grid
    groups: Groups[Group]
    links: Links
    token: AbortToken
    executor: Executor
    plans: Plans


@dataclass(kw_only=True)
class RankRuntime:
    """One rank: what it keeps for the whole run, and, while it has a place in a generation, that generation's parts."""

    config: Config
    rank: int
    coordinates: Coordinates
    """Stage and replica keep their numbers for the whole run."""
    first_grid: Grid
    """The run's, before anybody was lost."""
    tp: TensorParallel
    chunks: nn.ModuleList
    """This stage's part of the model, one module for each of its virtual stages."""
    optimizer: ShardedOptimizer
    train_loader: LaneLoader
    evaluate_loader: LaneLoader | None
    layout: EntryLayout
    """Of an entry of a whole batch."""
    learning_rate: LrSchedule
    device: torch.device
    state: TrainState
    on_instruction: InstructionHook
    phase_hook: PhaseHook
    label: Label = lambda instruction: NO_LABEL
    peak: Peak | None = None
    """What a rank's device can do, once that is known: the mean over the ranks."""
    resumed_from: int = 0
    """The iteration of the checkpoint with which this run has begun; 0: from the start."""
    parts: GenerationParts | None = None

    @property
    def grid(self) -> Grid:
        return self._parts.grid

    @property
    def groups(self) -> Groups[Group]:
        return self._parts.groups

    @property
    def token(self) -> AbortToken:
        """Aborted when the generation is over."""
        return self._parts.token

    @property
    def executor(self) -> Executor:
        return self._parts.executor

    @property
    def train_plan(self) -> Plan:
        """Of the iteration that follows the state's."""
        return self.plan_next(self._parts.plans)

    def plan_next(self, plans: Plans) -> Plan:
        """The one of `plans` that is for the iteration that follows the state's."""
        return plans.train(self.train_batch(self.state.iteration + 1).num_micro_batches)

    @property
    def evaluate_plan(self) -> Plan:
        return self._parts.plans.evaluate

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches of the iteration that follows the state's this rank's replica handles."""
        return sum(route[self.coordinates.pp] == self.coordinates.dp for route in self.train_plan.routes)

    @property
    def is_leader(self) -> bool:
        """The lowest live rank of the grid speaks for all."""
        return self.rank == self.grid.ranks[0]

    def train_batch(self, iteration: int) -> BatchPlan:
        """The batch of the iteration that follows the state's."""
        batch = plan_batch(self.config, iteration, self.state.shape)
        return replace(batch, loss_factor=self.state.loss_scale.factor)

    def layout_of(self, batch: BatchPlan) -> EntryLayout:
        """Where everything stands in the vector of that batch's entry."""
        return replace(self.layout, num_micro_batches=batch.num_micro_batches, num_slots=batch.num_slots)

    @property
    def learning_rate_now(self) -> float:
        """That of the newest update."""
        return self.learning_rate.at(updates=self.state.num_updates, tokens=self.state.tokens_trained)

    def shard_maps_on(self, grid: Grid, hosts: Mapping[int, str]) -> ShardMaps:
        """Who holds which range of this rank's buckets."""
        return shard_maps_of(self.config, self.coordinates, grid, hosts)

    def build_groups(self, grid: Grid, generation: int, transports: Transports) -> Groups[Group]:
        """This rank's groups in a generation in whose grid it has a place."""
        tied = self.config.model.tie_word_embeddings
        return build_groups(grid, self.rank, generation, transports.make_group, tied=tied)

    def update_step(self) -> UpdateStep | None:
        """The update that the newest entry asks for; None when its gradient is not finite."""
        entry = self.state.entries[-1]
        if not entry.finite:
            return None
        return UpdateStep(
            number=self.state.num_updates,
            learning_rate=self.learning_rate_now,
            grad_scale=entry.grad_scale(self.config.optimizer.max_grad_norm),
        )

    def join(self, generation: int, groups: Groups[Group], plans: Plans, transports: Transports) -> None:
        """Takes up a generation in whose grid this rank has a place."""
        grid = plans.grid
        self.tp.group = groups.tp
        self.optimizer.join(generation, groups, transports.links)
        executor = Executor(
            chunks=list(self.chunks),
            grid=grid,
            rank=self.rank,
            generation=generation,
            links=transports.links,
            tp=self.tp,
            hidden_size=self.config.model.hidden_size,
            dtype=policy_of(self.config.precision).compute,
            device=self.device,
            token=transports.token,
            on_instruction=self.on_instruction,
            label=self.label,
            after_compute=self.optimizer.finalize_micro_batch_grads,
        )
        self.parts = GenerationParts(
            generation=generation,
            grid=grid,
            groups=groups,
            links=transports.links,
            token=transports.token,
            executor=executor,
            plans=plans,
        )

    def leave(self) -> Groups[Group] | None:
        """Lets go of the generation; the groups come back, in which something may still be under way."""
        parts, self.parts = self.parts, None
        self.optimizer.leave()
        self.tp.group = AbsentGroup(name="none", rank=self.tp.group.rank, ranks=self.tp.group.ranks)
        return parts.groups if parts else None

    def close(self) -> None:
        self._parts.links.close()
        self._parts.groups.close()

    @property
    def _parts(self) -> GenerationParts:
        assert self.parts is not None, f"rank {self.rank} has no place in a generation"
        return self.parts


def build_grid(config: Config) -> Grid:
    """The grid that the configuration asks for."""
    return Grid.of_replicas(stage_replicas(config), tp_size=config.parallel.tp_size, order=config.parallel.order)


def shard_maps_of(config: Config, coordinates: Coordinates, grid: Grid, hosts: Mapping[int, str]) -> ShardMaps:
    """Who holds which range of optimizer state, of all that stand at this stage and tensor-parallel position."""
    return plan_shard_maps(
        grid,
        coordinates.pp,
        coordinates.tp,
        zero_stage=config.parallel.zero_stage,
        zero_backups=config.elastic.zero_backups,
        hosts=hosts,
    )


def plan_batch(config: Config, iteration: int, shape: BatchShape | None = None) -> BatchPlan:
    """The batch of one iteration, of the shape that the run has come to; None: a whole one."""
    batch = config.batch
    assert batch.num_micro_batches is not None and batch.micro_batch_size is not None
    return BatchPlan(
        seed=config.run.seed,
        iteration=iteration,
        num_micro_batches=shape.num_sequences // batch.micro_batch_size if shape else batch.num_micro_batches,
        micro_batch_size=batch.micro_batch_size,
        sequence_length=shape.sequence_length if shape else batch.sequence_length,
        masks_documents=config.data.document_mask,
    )


def plan_schedule(config: Config, grid: Grid, schedule: PipelineSchedule, num_micro_batches: int) -> Plan:
    """The instruction lists for the replicas that are there; where some are lost, the best of the ways round them."""
    request = PlanRequest(
        replicas=grid.replicas,
        num_micro_batches=num_micro_batches,
        schedule=schedule,
        costs=pass_costs(split_layers(config), costs_of(config), recomputes=config.parallel.recompute == "full"),
        virtual_stages=config.parallel.virtual_stages,
        slots=config.parallel.p2p_slots,
    )
    return choose_plan(
        request,
        may_split=config.parallel.split_backward != "never",
        max_extra_in_flight=config.parallel.max_extra_in_flight,
    )


def split_layers(config: Config) -> tuple[range, ...]:
    """The layers of each virtual stage: by hand, or balanced by cost with the embedding and the head weighed in."""
    if config.parallel.layers_per_stage is not None:
        return partition_from_counts(config.parallel.layers_per_stage)
    costs = costs_of(config)
    layers = [costs.layer] * config.model.num_hidden_layers
    num_stages = config.parallel.pp_size * config.parallel.virtual_stages
    return partition_layers(layers, num_stages, costs.embedding, costs.head)


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
        num_mlp_matrices=num_mlp_matrices(model),
    )


def prepare_rank(
    config: Config,
    rank: int,
    grid: Grid,
    *,
    make_stage: MakeStage,
    train_lanes: Reader,
    evaluate_lanes: Lanes | None,
    device: torch.device,
    eos_id: int | None = None,
    initial: InitMethod | None = None,
    on_instruction: InstructionHook = lambda instruction: None,
    phase_hook: PhaseHook = lambda phase: None,
    label: Label = lambda instruction: NO_LABEL,
) -> RankRuntime:
    """What a rank of the run's first grid keeps for its life: layers with their initial weights, buckets, loaders.

    `eos_id` ends documents in both sets of lanes; needed where attention keeps them apart. Weights begin as `initial`
    says, or as the seed does.
    """
    assert eos_id is not None or not config.data.document_mask, "who keeps documents apart must know where they end"
    parallel, coordinates, policy = config.parallel, grid.coordinates(rank), policy_of(config.precision)
    batch, shape_schedule = plan_batch(config, 0), build_shape_schedule(config)
    starts = tuple(train_lanes.start(slot) for slot in range(batch.num_slots))
    tp_ranks = grid.tp_ranks(coordinates.replica)
    tp = TensorParallel(
        group=AbsentGroup(name="none", rank=coordinates.tp, ranks=tp_ranks),
        sequence_parallel=parallel.sequence_parallel,
    )
    border = eos_id if config.data.document_mask else None
    mine = split_layers(config)[coordinates.pp :: parallel.pp_size]
    chunks = nn.ModuleList(make_stage(config, layers, tp, device) for layers in mine)
    optimizer = ShardedOptimizer(
        chunks,
        rank=rank,
        seed=config.run.seed,
        tp_rank=coordinates.tp,
        tp_size=len(tp_ranks),
        first_shard_maps=shard_maps_of(config, coordinates, grid, hosts={}),
        zero_stage=parallel.zero_stage,
        bucket_bytes=int(parallel.bucket_mib * 2**20),
        decay_norms_and_biases=config.optimizer.decay_norms_and_biases,
        policy=policy,
        settings=AdamWSettings(
            beta1=config.optimizer.beta1,
            beta2=config.optimizer.beta2,
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
            backend=optimizer_backend(config, device),
        ),
        initial=initial,
        overlap_reduce=parallel.overlap_grad_reduce,
        overlap_gather=parallel.overlap_param_gather,
        fixed=exact_format(config, batch, len(tp_ranks)),
        device=device,
        phase_hook=phase_hook,
    )
    return RankRuntime(
        config=config,
        rank=rank,
        coordinates=coordinates,
        first_grid=grid,
        tp=tp,
        chunks=chunks,
        optimizer=optimizer,
        train_loader=LaneLoader(train_lanes, device, border, read_length=shape_schedule.read_length),
        evaluate_loader=LaneLoader(EvaluationSequences(evaluate_lanes), device, border) if evaluate_lanes else None,
        layout=EntryLayout(
            num_stages=grid.pp_size * parallel.virtual_stages,
            num_micro_batches=batch.num_micro_batches,
            num_slots=batch.num_slots,
            num_ranks=len(grid.ranks) if config.monitor.norms_every is not None else 0,
            cursor_size=len(starts[0]),
        ),
        learning_rate=build_lr_schedule(config),
        device=device,
        state=TrainState.start(starts, build_loss_scale(config, batch), build_training_monitor(config), shape_schedule),
        on_instruction=on_instruction,
        phase_hook=phase_hook,
        label=label,
    )


def optimizer_backend(config: Config, device: torch.device) -> Backend:
    """What runs the updates; ConfigError where it can't be had."""
    asked = config.optimizer.backend
    if asked == "auto" and policy_of(config.precision).state != torch.float32:
        asked = "torch"
    module, name = apex_adamw.SYMBOL
    return choose_backend("optimizer.backend", asked, module=module, name=name, device_type=device.type)


def exact_format(config: Config, batch: BatchPlan, tp_size: int) -> FixedPoint | None:
    """The format in which gradients are added exactly; None: as floats.

    Partial gradients of a replica's ranks are terms of their own, and so are the head's and the embedding's gradients
    where these are one parameter: elsewhere they come up on different ranks.
    """
    if config.precision.sums == "float":
        return None
    num_uses = 2 if config.model.tie_word_embeddings else 1
    return plan_fixed_point(num_tokens=batch.num_tokens, num_terms=batch.num_micro_batches * tp_size * num_uses)


def build_loss_scale(config: Config, batch: BatchPlan) -> LossScale:
    """The scale of the first iteration; 1 for ever where the policy has none."""
    if not policy_of(config.precision).scales_loss:
        return UNSCALED
    scale = config.precision.loss_scale
    return LossScale(
        scale=scale.initial,
        growth_interval=scale.growth_interval,
        growth_factor=scale.growth_factor,
        backoff_factor=scale.backoff_factor,
        min_scale=scale.min,
        num_tokens_log2=(batch.num_tokens - 1).bit_length(),
    )


def build_training_monitor(config: Config) -> TrainingMonitor:
    """The monitors' rules, and nothing seen yet."""
    rules = DivergenceRules(
        beta2=config.optimizer.beta2,
        max_loss_ratio=config.monitor.max_loss_ratio,
        ends_run=config.monitor.divergence == "stop",
    )
    return TrainingMonitor(max_grad_norm=config.optimizer.max_grad_norm, divergence=Divergence(rules=rules))


def start_rank(rank: RankRuntime, grid: Grid, transports: Transports, *, generation: int = 0) -> None:
    """Begins the run in a world whose membership never changes: no coordinator, no record."""
    shard_maps = rank.shard_maps_on(grid, hosts={})
    rank.optimizer.reshard(
        ReshardPlan(generation=generation, old=None, new=shard_maps, live=grid.ranks), transports.links
    )
    rank.optimizer.commit()
    groups = rank.build_groups(grid, generation, transports)
    rank.join(generation, groups, Plans(rank.config, grid), transports)
    if not rank.optimizer.is_gathered:  # it has begun from a checkpoint
        rank.optimizer.gather()
