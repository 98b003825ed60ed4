"""Wires one rank: from the configuration and its coordinates in the grid to its RankContext.

The only place that wires. What differs between worlds is passed in (groups, links, the model's constructor, the lanes):
threads of one process, gloo processes and a single process are built by the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from parallel3d.accelerator import accelerator_of
from parallel3d.config.schema import Config
from parallel3d.config.warmup_builder import build_shape_schedule
from parallel3d.data.lanes import Lanes
from parallel3d.data.reader import Reader
from parallel3d.kernels.choice import KernelForm, choose_kernels
from parallel3d.kernels.launch_kernel import launch_triton
from parallel3d.kernels.range_kernels import range_kernels
from parallel3d.layers.gemm import Gemm
from parallel3d.layers.gradient_sink import WeightGradStore
from parallel3d.layers.init import InitMethod, awaited_value
from parallel3d.layers.micro_batch import BatchPlan
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.monitor.divergence import Divergence, DivergenceRules
from parallel3d.monitor.training_monitor import TrainingMonitor
from parallel3d.optim.distributed_optimizer import ShardedOptimizer
from parallel3d.optim.kernels import choose_update_backend
from parallel3d.optim.optimizer_settings import OptimizerSettings
from parallel3d.optim.update_rules import has_exp_avg_sq
from parallel3d.optim.updater import Updaters
from parallel3d.parallel.grid import Coordinates, Grid, PartId
from parallel3d.parallel.group import AbsentGroup
from parallel3d.parallel.sharding import TpShard
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.pipeline.compute_clock import ComputeClock, DeviceClock, HostClock
from parallel3d.precision.fixed_point import FixedPoint, plan_fixed_point
from parallel3d.precision.loss_scale import UNSCALED, LossScale
from parallel3d.precision.policy import policy_of
from parallel3d.trainer.batching import plan_batch
from parallel3d.trainer.context import RankContext, RankHooks
from parallel3d.trainer.entry_layout import EntryLayout
from parallel3d.trainer.generation import shard_maps_of
from parallel3d.trainer.learning_rate import build_lr_schedule
from parallel3d.trainer.loader import EvaluationSequences, LaneLoader
from parallel3d.trainer.plans import chunk_layout_of, split_layers, widest_grid
from parallel3d.trainer.state import TrainState


class MakeStage(Protocol):
    """Makes a rank's share of some layers; `gemm` computes their products, by default with the library for fp32."""

    def __call__(
        self, config: Config, layers: range, tp: TensorParallel, device: torch.device, *, gemm: Gemm | None
    ) -> nn.Module: ...


"""The model's constructor: configuration, layers of this stage, tensor-parallel region, device."""


@dataclass(frozen=True, kw_only=True)
class RunLanes:
    """The token streams of a run."""

    train: Reader
    evaluate: Lanes | None = None
    eos_id: int | None = None
    """The token that ends documents, in both; required where attention keeps documents apart."""


def prepare_rank(
    config: Config,
    rank: int,
    grid: Grid,
    *,
    part: PartId | None = None,
    make_stage: MakeStage,
    lanes: RunLanes,
    device: torch.device,
    initial: InitMethod | None = None,
    hooks: RankHooks | None = None,
    gemm: Gemm | None = None,
) -> RankContext:
    """Builds what a rank keeps for the whole run: layers with their weights, buckets, loaders.

    `grid` is the run's first. `part` is what a new worker builds, a stage and a tensor-parallel rank; its weights come
    from others. None: `grid` has a place for `rank`. `initial` None draws weights from the seed. All have one `gemm`.
    """
    initial = initial if part is None else awaited_value
    coordinates, hooks = grid.coordinates(rank) if part is None else grid.first_of(part), hooks or RankHooks()
    tp = TensorParallel(
        group=AbsentGroup(name="none", rank=coordinates.tp, ranks=grid.tp_ranks(coordinates.replica)),
        sequence_parallel=config.parallel.sequence_parallel,
    )
    chunks = build_chunks(config, coordinates.pp, tp, make_stage, device, gemm)
    train_loader, evaluate_loader = build_loaders(config, lanes, device)
    state, grads, gemm = build_start_state(config, lanes.train), WeightGradStore(), gemm or Gemm()
    return RankContext(
        config=config,
        rank=rank,
        coordinates=coordinates,
        first_grid=grid,
        device=device,
        tp=tp,
        chunks=chunks,
        weight_grads=grads,
        optimizer=build_optimizer(
            config, rank, coordinates, grid, chunks, grads, gemm.kernels, device=device, initial=initial, hooks=hooks
        ),
        gemm=gemm,
        train_loader=train_loader,
        evaluate_loader=evaluate_loader,
        layout=build_entry_layout(config, grid, cursor_size=len(state.cursors[0])),
        learning_rate=build_lr_schedule(config),
        hooks=hooks,
        state=state,
        clock=choose_clock(config, device, hooks),
    )


def build_chunks(
    config: Config, stage: int, tp: TensorParallel, make_stage: MakeStage, device: torch.device, gemm: Gemm | None
) -> nn.ModuleList:
    """The modules of a stage, one for each of its virtual stages."""
    partition = split_layers(config)
    own_layers = [partition[k] for k in chunk_layout_of(config).virtual_stages[stage]]
    chunks = nn.ModuleList(make_stage(config, layers, tp, device, gemm=gemm) for layers in own_layers)
    share_parameters(chunks)
    return chunks


def share_parameters(chunks: nn.ModuleList) -> None:
    """Makes parameters of one name one parameter: a tied embedding, where one stage has both of its chunks."""
    first_of: dict[str, nn.Parameter] = {}
    for module in chunks.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            name = cast(ShardedParameter, parameter).sharding.name
            setattr(module, attribute, first_of.setdefault(name, parameter))


def choose_clock(config: Config, device: torch.device, hooks: RankHooks) -> ComputeClock:
    """The device's clock where its seconds are of use: for `elastic.balance`, and to make it slow; else the host's.

    On a GPU that several ranks share, a compute's time is also that of the others, and says nothing.
    """
    accelerator, elastic = accelerator_of(device), config.elastic
    is_of_use = elastic.balance or any(fault.kind == "slow" for fault in elastic.faults)
    if accelerator is None or not is_of_use or config.run.device == "cuda_shared":
        return HostClock(hooks.compute_hook)
    return DeviceClock(accelerator, hooks.slowness)


def build_optimizer(
    config: Config,
    rank: int,
    coordinates: Coordinates,
    grid: Grid,
    chunks: nn.ModuleList,
    weight_grads: WeightGradStore,
    form: KernelForm,
    *,
    device: torch.device,
    initial: InitMethod | None,
    hooks: RankHooks,
) -> ShardedOptimizer:
    """The optimizer of a rank's chunks; it owns buckets, initial weights and the rank's ranges of state. `form`: what
    the ranks have agreed on for `run.kernels` auto."""
    tp = TpShard(rank=coordinates.tp, size=grid.tp_size)
    return ShardedOptimizer(
        chunks,
        build_optimizer_settings(config, tp.size, device, form),
        rank=rank,
        tp=tp,
        widest_shard_maps=shard_maps_of(config, coordinates, widest_grid(config, grid), hosts={}),
        initial=initial,
        weight_grads=weight_grads,
        device=device,
        phase_hook=hooks.phase_hook,
    )


def build_optimizer_settings(
    config: Config, tp_size: int, device: torch.device, agreed: KernelForm
) -> OptimizerSettings:
    """The settings of the run's optimizer; ConfigError where its backend can't be had on `device`."""
    parallel, policy = config.parallel, policy_of(config.precision)
    backend = choose_update_backend(config.optimizer, policy.state, device.type)
    form = choose_kernels(config.run.kernels, device, agreed=agreed)
    return OptimizerSettings(
        seed=config.run.seed,
        is_sharded=parallel.zero_stage == 1,
        bucket_bytes=int(parallel.bucket_mib * 2**20),
        policy=policy,
        updaters=Updaters.build(config.optimizer, backend, range_kernels(form, launch_triton)),
        fixed=exact_format(config, plan_batch(config, 0), tp_size),
        overlap_reduce=parallel.overlap_grad_reduce,
        overlap_gather=parallel.overlap_param_gather,
        measures_norms=config.monitor.norms_every is not None,
    )


def build_loaders(config: Config, lanes: RunLanes, device: torch.device) -> tuple[LaneLoader, LaneLoader | None]:
    """The loaders of training and of evaluation; the second is None without a validation text."""
    assert lanes.eos_id is not None or not config.data.document_mask, "a document mask needs the token that ends them"
    eos_id = lanes.eos_id if config.data.document_mask else None
    train = LaneLoader(lanes.train, device, eos_id, read_length=build_shape_schedule(config).read_length)
    if lanes.evaluate is None:
        return train, None
    return train, LaneLoader(EvaluationSequences(lanes.evaluate), device, eos_id)


def build_start_state(config: Config, train_lanes: Reader) -> TrainState:
    """The state before the first iteration."""
    batch = plan_batch(config, 0)
    return TrainState(
        cursors=tuple(train_lanes.start(slot) for slot in range(batch.num_slots)),
        loss_scale=build_loss_scale(config, batch),
        monitor=build_training_monitor(config),
        shape_schedule=build_shape_schedule(config),
    )


def build_entry_layout(config: Config, grid: Grid, *, cursor_size: int) -> EntryLayout:
    """The vector layout of the entry of a full-size batch."""
    batch = plan_batch(config, 0)
    return EntryLayout(
        num_stages=grid.pp_size * config.parallel.virtual_stages,
        num_micro_batches=batch.num_micro_batches,
        num_slots=batch.num_slots,
        num_ranks=len(widest_grid(config, grid).ranks) if config.monitor.norms_every is not None else 0,
        cursor_size=cursor_size,
        has_variance=has_exp_avg_sq(config.optimizer.kind),
    )


def exact_format(config: Config, batch: BatchPlan, tp_size: int) -> FixedPoint | None:
    """The fixed-point format in which gradients are summed exactly; None when they are summed as floats.

    Each tensor-parallel rank's partial gradient of a micro-batch is one term of the sum. Tied embeddings double the
    terms: head and embedding both add to the one parameter, possibly on different ranks.
    """
    if config.precision.sums == "float":
        return None
    num_uses = 2 if config.model.tie_word_embeddings else 1
    return plan_fixed_point(num_tokens=batch.num_tokens, num_terms=batch.num_micro_batches * tp_size * num_uses)


def build_loss_scale(config: Config, batch: BatchPlan) -> LossScale:
    """The loss scale of the first iteration; constantly 1 under a policy that does not scale."""
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
    """A monitor with the run's rules that has seen no step yet."""
    rules = DivergenceRules(
        beta2=config.optimizer.exp_avg_sq_decay,
        max_loss_ratio=config.monitor.max_loss_ratio,
        ends_run=config.monitor.divergence == "stop",
    )
    return TrainingMonitor(max_grad_norm=config.optimizer.max_grad_norm, divergence=Divergence(rules=rules))
