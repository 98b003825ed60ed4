"""A tiny sharded model on ranks that are threads, its gradients, and torch's AdamW on the whole parameters.

Gradients are small multiples of 1/16, whose sums are exact in fp32 in any order: the bits don't depend on the layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from parallel3d.config.sections.optimizer import OptimizerConfig
from parallel3d.inprocess.world import ThreadWorld
from parallel3d.kernels.range_kernels import TORCH_RANGE_KERNELS, RangeKernels
from parallel3d.layers.init import initial_value
from parallel3d.layers.parameter import ShardedParameter, parameters_of
from parallel3d.optim.distributed_optimizer import PhaseHook, ShardedOptimizer
from parallel3d.optim.optimizer_settings import OptimizerSettings
from parallel3d.optim.reshard import ReshardPlan
from parallel3d.optim.shard_map import ShardMaps, plan_shard_maps
from parallel3d.optim.state_norms import StateNorms
from parallel3d.optim.update_rules.update_rule import UpdateStep
from parallel3d.optim.updater import Updaters
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.groups import build_groups
from parallel3d.parallel.host_numbers import HostNumbers
from parallel3d.parallel.sharding import UNSHARDED, FusedBlock, ParamSharding, TpShard
from parallel3d.precision.policy import POLICIES, Policy

SEED = 7
LEARNING_RATES = (1e-2, 3e-2, 0.0, 5e-3)
GRAD_SCALES = (1.0, 0.25, 1.0, 0.5)
NUM_STEPS = len(LEARNING_RATES)
QKV = (FusedBlock(name="q", size=24), FusedBlock(name="k", size=8), FusedBlock(name="v", size=8))
ONE_KV_HEAD = (
    FusedBlock(name="q", size=24),
    FusedBlock(name="k", size=8, max_parts=1),
    FusedBlock(name="v", size=8, max_parts=1),
)
SHARDINGS = [
    ParamSharding(name="embedding", shape=(37, 12), dim=0, padded=True, init_std=0.5),
    ParamSharding(name="norm", shape=(12,), partial_grad=True, is_norm_or_bias=True),
    ParamSharding(name="qkv", shape=(40, 12), dim=0, fused_blocks=QKV, init_std=0.5),
    ParamSharding(name="one_kv_head", shape=(40, 12), dim=0, fused_blocks=ONE_KV_HEAD, init_std=0.5),
    ParamSharding(name="output", shape=(12, 24), dim=1, init_std=0.5),
    ParamSharding(name="router", shape=(5, 12), init_std=0.5),
    ParamSharding(name="last_norm", shape=(12,), is_norm_or_bias=True),
]


class Module(nn.Module):
    """A module with one parameter, whose forward pass returns the weights."""

    def __init__(self, sharding: ParamSharding, tp_size: int, dtype: torch.dtype):
        super().__init__()
        self.weight = ShardedParameter(sharding, tp_size=tp_size, dtype=dtype)

    def forward(self) -> Tensor:
        return self.weight.detach().clone()


def make_stage(tp_size: int, policy: Policy) -> nn.ModuleList:
    return nn.ModuleList([Module(sharding, tp_size, policy.compute) for sharding in SHARDINGS])


def gradient(sharding: ParamSharding, part: int, step: int) -> Tensor:
    """The whole gradient of one part of the batch: the micro-batches of one replica while all are alive."""
    seed = 1000 * SHARDINGS.index(sharding) + 10 * step + part
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(-64, 65, sharding.shape, generator=numbers).to(torch.float64) / 16


def cut_local(sharding: ParamSharding, whole: Tensor, tp: TpShard) -> Tensor:
    """This rank's share, zeros for padding."""
    if sharding.dim is None:
        return whole
    local = whole.new_zeros(sharding.local_shape(tp.size))
    for run in sharding.runs(tp):
        piece = whole.narrow(sharding.dim, run.global_start, run.length)
        local.narrow(sharding.dim, run.local_start, run.length).copy_(piece)
    return local


def local_gradient(sharding: ParamSharding, part: int, step: int, tp: TpShard) -> Tensor:
    """The gradient that one rank's backward pass adds: a partial gradient is that of its tokens, and a row that several
    ranks hold has that of its query heads."""
    whole, tp_share = gradient(sharding, part, step), 0.25 if tp.rank == 0 else 0.75 / max(1, tp.size - 1)
    if sharding.partial_grad and tp.size > 1:
        return tp_share * whole
    local = cut_local(sharding, whole, tp)
    for run in sharding.runs(tp):
        if sharding.dim is not None and run.copies > 1:
            assert run.copies == tp.size
            local.narrow(sharding.dim, run.local_start, run.length).mul_(tp_share)
    return local


def backward(stage: nn.Module, part: int, step: int, tp: TpShard) -> None:
    """Adds one part's gradients as the layers do: last parameter first."""
    for parameter in reversed(parameters_of(stage)):
        parameter.sink.add(local_gradient(parameter.sharding, part, step, tp))


class Rank:
    """One rank of a stage, from generation to generation, without a coordinator: the test decides which ranks live."""

    def __init__(
        self,
        rank: int,
        world: ThreadWorld,
        *,
        tp_size: int,
        dp_size: int,
        zero_stage: int = 1,
        zero_backups: int = 0,
        hosts: Mapping[int, str] | None = None,
        policy: str = "fp64",
        kind: str = "adamw",
        bucket_bytes: int = 2000,
        overlap_reduce: bool = False,
        overlap_gather: bool = False,
        phase_hook: PhaseHook = lambda phase: None,
        kernels: RangeKernels = TORCH_RANGE_KERNELS,
    ):
        self.rank, self.world = rank, world
        self.tp_size, self.dp_size = tp_size, dp_size
        self.zero_stage, self.zero_backups = zero_stage, zero_backups
        self.hosts = hosts or {}
        self.grid = Grid.uniform(tp_size=tp_size, pp_size=1, dp_size=dp_size)
        self.coordinates = self.grid.coordinates(rank)
        self.stage = make_stage(tp_size, POLICIES[policy])
        settings = OptimizerSettings(
            seed=SEED,
            is_sharded=zero_stage == 1,
            bucket_bytes=bucket_bytes,
            policy=POLICIES[policy],
            updaters=Updaters.build(OptimizerConfig(learning_rate=1.0, kind=kind), kernels=kernels),
            measures_norms=True,
            overlap_reduce=overlap_reduce,
            overlap_gather=overlap_gather,
        )
        self.optimizer = ShardedOptimizer(
            self.stage,
            settings,
            rank=rank,
            tp=self.tp_shard,
            widest_shard_maps=self.shard_maps_on(self.grid),
            device=torch.device("cpu"),
            phase_hook=phase_hook,
        )
        self.optimizer.reshard(
            ReshardPlan(generation=0, old=None, new=self.shard_maps_on(self.grid), live=self.grid.ranks),
            world.links(rank),
        )
        self.optimizer.commit()
        self.join(0, self.grid)

    @property
    def tp_shard(self) -> TpShard:
        return TpShard(rank=self.coordinates.tp, size=self.tp_size)

    @property
    def buckets(self):
        return self.optimizer.buckets

    def shard_maps_on(self, grid: Grid) -> ShardMaps:
        return plan_shard_maps(
            grid, 0, self.coordinates.tp, zero_stage=self.zero_stage, zero_backups=self.zero_backups, hosts=self.hosts
        )

    def join(self, generation: int, grid: Grid) -> None:
        self.grid = grid
        groups = build_groups(grid, self.rank, generation, self.world.make_group(self.rank), tied=False)
        self.optimizer.join(generation, groups, self.world.links(self.rank, generation))

    def move(self, generation: int, previous: Grid, live: Collection[int], *, weights_gathered: bool = False) -> int:
        """Builds the ranges for the live ranks of `previous` without committing them; returns the bytes received."""
        grid, _ = previous.without(set(previous.ranks) - set(live))
        old, new = self.shard_maps_on(previous), self.shard_maps_on(grid)
        change = ReshardPlan(generation=generation, old=old, new=new, live=live, weights_gathered=weights_gathered)
        return self.optimizer.reshard(change, self.world.links(self.rank, generation))

    def regroup(
        self, generation: int, previous: Grid, live: Collection[int], *, weights_gathered: bool = False
    ) -> bool:
        """Commits the ranges that `move` has built; False: this rank has become a spare."""
        self.optimizer.commit()
        grid, _ = previous.without(set(previous.ranks) - set(live))
        if not grid.holds(self.rank):
            return False
        self.join(generation, grid)
        if not weights_gathered:
            self.optimizer.gather()
        return True

    def reduce(self, step: int) -> None:
        """The gradients of iteration `step` + 1: the others take over the parts of lost replicas."""
        replicas = sorted(self.grid.stages[0])
        mine = [part for part in range(self.dp_size) if replicas[part % len(replicas)] == self.coordinates.dp]
        self.optimizer.begin_iteration(step + 1, len(mine))
        for part in mine:
            backward(self.stage, part, step, self.tp_shard)
        self.optimizer.finish_reduction()

    def squared_norm(self) -> float:
        """This rank's part of the squared norm of the reduced gradients."""
        numbers = HostNumbers()
        norm = self.optimizer.squared_norm(numbers)
        numbers.read()
        return norm().value

    def state_norms(self) -> StateNorms:
        """This rank's part of the norms of the state as it is."""
        numbers = HostNumbers()
        norms = self.optimizer.state_norms(numbers)
        numbers.read()
        return norms()

    def step(self, step: int) -> None:
        self.reduce(step)
        self.optimizer.update(step + 1, update_step(step))

    def weights(self) -> dict[str, Tensor]:
        """The weights that forward passes see, by parameter."""
        return {module.weight.sharding.name: module() for module in self.stage}

    def state(self) -> list[dict[tuple[int, int], Tensor]]:
        """Both moments and master weights (3, n) of each range of the rank, by bucket and span, its own first."""
        return [
            {(s.span.start, s.span.stop): s.read(s.span.start, s.span.stop, with_master=True) for s in bucket.shards}
            for bucket in self.buckets
        ]


def update_step(step: int) -> UpdateStep:
    return UpdateStep(
        number=step + 1,
        learning_rate=LEARNING_RATES[step],
        peak_learning_rate=1.0,
        grad_scale=GRAD_SCALES[step],
    )


def reference(num_parts: int, dtype: torch.dtype = torch.float64) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """The same steps with torch.optim.AdamW on whole parameters: weights and squared norms after every step."""
    weights = {
        sharding.name: nn.Parameter(initial_value(sharding, seed=SEED, tp=UNSHARDED).to(dtype))
        for sharding in SHARDINGS
    }
    decayed = [weights[s.name] for s in SHARDINGS if not s.is_norm_or_bias]
    others = [weights[s.name] for s in SHARDINGS if s.is_norm_or_bias]
    constants = OptimizerConfig(learning_rate=1.0)
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": constants.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(constants.beta1, constants.beta2),
        eps=constants.eps,
        foreach=False,
    )
    history, norms = [], []
    for step, (learning_rate, grad_scale) in enumerate(zip(LEARNING_RATES, GRAD_SCALES)):
        totals = {s.name: sum(gradient(s, part, step) for part in range(num_parts)) for s in SHARDINGS}
        norms.append(sum(total.square().sum() for total in totals.values()))
        for name, total in totals.items():
            weights[name].grad = (total * grad_scale).to(dtype)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        history.append({name: weight.detach().clone() for name, weight in weights.items()})
    return history, norms
