"""What one rank of a run holds, as data: for the whole run, and for the membership generation it is in.

    RankContext   config, coordinates, model chunks, optimizer, loaders, train state     built once (build.py)
    Generation    grid, groups, links, abort token, executor, plans                      per generation (generation.py)

Every part of the trainer takes the context and reads from it; only `state`, `generation` and `peak` are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from parallel3d.config.schema import Config
from parallel3d.layers.gemm import Gemm
from parallel3d.layers.gradient_sink import WeightGradStore
from parallel3d.monitor.flops import Peak
from parallel3d.optim.distributed_optimizer import PhaseHook, ShardedOptimizer
from parallel3d.optim.update_rules.update_rule import UpdateStep
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Coordinates, Grid
from parallel3d.parallel.group import Group
from parallel3d.parallel.groups import Groups, MakePair
from parallel3d.parallel.p2p_messages import Links
from parallel3d.parallel.sharding import TpShard
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.pipeline.chunk_layout import ChunkLayout
from parallel3d.pipeline.compute_clock import ComputeClock, ComputeHook, HostClock, Slowness
from parallel3d.pipeline.executor import NO_LABEL, Executor, InstructionHook, Label
from parallel3d.ramps import LrSchedule
from parallel3d.trainer.entry_layout import EntryLayout
from parallel3d.trainer.loader import LaneLoader
from parallel3d.trainer.plans import Plans, chunk_layout_of
from parallel3d.trainer.seen_steps import SeenSteps
from parallel3d.trainer.state import TrainState


@dataclass(frozen=True, kw_only=True)
class Transports:
    """How a rank reaches the others in one membership generation."""

    make_group: Callable[[str, tuple[int, ...]], Group]
    links: Links
    token: AbortToken
    make_pair: MakePair | None = None
    """Makes the communicator of two neighbouring ranks; None: they talk over the links of the host."""


@dataclass(frozen=True, kw_only=True)
class RankHooks:
    """Callbacks at the points where a rank can be observed, delayed or killed."""

    on_instruction: InstructionHook = lambda instruction: None
    """Called before each instruction of the pipeline."""
    compute_hook: ComputeHook = lambda seconds: seconds
    """Called at the end of each compute with its seconds, where the host's clock measures; returns those that count."""
    slowness: Slowness = lambda: 1.0
    """Returns how many times as long computes are to take, where the device's clock measures."""
    phase_hook: PhaseHook = lambda phase: None
    """Called at the named phases of a step and of a recovery."""
    label: Label = lambda instruction: NO_LABEL
    """Makes the profiler's range around an instruction."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A rank's part of one membership generation, with which it steps; released when the generation ends."""

    number: int
    grid: Grid
    leader: int
    """The rank that publishes for all."""
    groups: Groups[Group]
    links: Links
    token: AbortToken
    """Aborted when the generation ends."""
    executor: Executor
    plans: Plans


@dataclass(kw_only=True)
class RankContext:
    """One rank: what it keeps for the whole run, and its current generation."""

    config: Config
    rank: int
    coordinates: Coordinates
    """Its newest: stage and tensor-parallel rank never change, its replica may when vacancies are filled."""
    first_grid: Grid
    """The grid with which the run began, before any loss."""
    device: torch.device
    tp: TensorParallel
    chunks: nn.ModuleList
    """This stage's part of the model, one module for each of its virtual stages."""
    weight_grads: WeightGradStore
    """Shared by the gradient sinks of the chunks' parameters and the executor."""
    optimizer: ShardedOptimizer
    train_loader: LaneLoader
    evaluate_loader: LaneLoader | None
    layout: EntryLayout
    """Vector layout of the entry of a full-size batch."""
    learning_rate: LrSchedule
    hooks: RankHooks
    state: TrainState
    clock: ComputeClock = field(default_factory=HostClock)
    """Measures the computes of this rank's instruction lists."""
    gemm: Gemm = field(default_factory=Gemm)
    """Computes the products of the layers, the same on all ranks."""
    peak: Peak | None = None
    """Peak FLOP/s of a rank's device, mean over the ranks; None until it is measured or looked up."""
    history: SeenSteps = field(default_factory=SeenSteps)
    """Of the steps that this rank, or the one that sent it its train state, has seen."""
    resumed_from: int = 0
    """Iteration of the checkpoint from which this run was resumed; 0 when it began from the start."""
    generation: Generation | None = None
    """None while this rank is not part of a grid: before the first generation, between two, and as a spare."""

    @property
    def grid(self) -> Grid:
        return self.current.grid

    @property
    def tp_shard(self) -> TpShard:
        """This rank's share of its stage's parameters, the same for the whole run."""
        return TpShard(rank=self.coordinates.tp, size=self.first_grid.tp_size)

    @property
    def chunk_layout(self) -> ChunkLayout:
        return chunk_layout_of(self.config)

    @property
    def groups(self) -> Groups[Group]:
        return self.current.groups

    @property
    def token(self) -> AbortToken:
        return self.current.token

    @property
    def executor(self) -> Executor:
        return self.current.executor

    @property
    def plans(self) -> Plans:
        return self.current.plans

    @property
    def current(self) -> Generation:
        """The generation; it is an error to ask for it while there is none."""
        assert self.generation is not None, f"rank {self.rank} is not in a generation"
        return self.generation

    @property
    def is_leader(self) -> bool:
        """Whether this rank publishes for all."""
        return self.rank == self.current.leader

    @property
    def learning_rate_now(self) -> float:
        """Learning rate of the newest update."""
        return self.learning_rate.at(updates=self.state.num_updates, tokens=self.state.tokens_trained)

    def update_step(self) -> UpdateStep | None:
        """The update that the newest entry asks for; None when its gradient is not finite."""
        entry = self.state.entries[-1]
        if not entry.finite:
            return None
        return UpdateStep(
            number=self.state.num_updates,
            learning_rate=self.learning_rate_now,
            peak_learning_rate=self.config.optimizer.learning_rate,
            grad_scale=entry.grad_scale(self.config.optimizer.max_grad_norm),
        )
