"""The update of one bucket's ranges, by the policy and in the chosen form.

In the Triton and the C form one kernel updates a range, rounds, writes the copies of master weights and measures the
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.kernels.range_kernels import RangeKernels
from parallel3d.kernels.update_table import Piece, UpdateTable
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.optim.bucket_plan import BucketPlan
from parallel3d.optim.matrices import make_directions
from parallel3d.optim.optimizer_settings import OptimizerSettings
from parallel3d.optim.parameter_noise import ParameterNoise
from parallel3d.optim.state_shard import Shard
from parallel3d.optim.update_pieces import pieces_of
from parallel3d.optim.update_rules.update_rule import EXP_AVG_SQ, MatrixRule, UpdateStep
from parallel3d.optim.updater import Updater
from parallel3d.precision.policy import Policy


@dataclass(frozen=True, kw_only=True)
class RangeUpdate:
    """Updates ranges of one bucket."""

    plan: BucketPlan
    parameters: Sequence[ShardedParameter]
    policy: Policy
    updater: Updater
    kernels: RangeKernels
    weight_decay: float
    noise: ParameterNoise

    @staticmethod
    def build(
        plan: BucketPlan, parameters: Sequence[ShardedParameter], settings: OptimizerSettings, noise: ParameterNoise
    ) -> RangeUpdate:
        """How the ranges of a bucket are updated by the run's settings."""
        updaters = settings.updaters
        return RangeUpdate(
            plan=plan,
            parameters=parameters,
            policy=settings.policy,
            updater=updaters.of(plan.key.is_matrix_wise),
            kernels=updaters.kernels,
            weight_decay=updaters.weight_decay if plan.key.decay else 0.0,
            noise=noise,
        )

    def update(
        self, shard: Shard, weights: Tensor, step: UpdateStep, iteration: int, *, measures: bool
    ) -> Tensor | None:
        """Makes one step on `shard`, and copies its master weights, if they are copies, to `weights` (n,), those of the
        layers. `iteration` keys the rounding noise. Returns what the kernel has measured, if it `measures`."""
        if self._is_one_kernel:
            return self._update_in_one_kernel(shard, weights, step, iteration, measures)
        noise = None
        if self.policy.update_rounding == "stochastic":
            noise = self.noise.of_range(self.plan, self.parameters, shard.span.start, "update", iteration)
        self.updater.update(
            shard.master,
            shard.states,
            shard.grads,
            step,
            weight_decay=self.weight_decay,
            noise=noise,
            directions=self._directions(shard, step),
        )
        if self.policy.has_master:
            weights.copy_(shard.master)
        return None

    @property
    def _is_one_kernel(self) -> bool:
        return self.updater.range_formula is not None and self.policy.state != torch.float64

    def pieces(self, span: range) -> tuple[Piece, ...]:
        """The pieces of a range, of which the kernel needs a table."""
        parameters = zip(self.parameters, self.plan.param_slots)
        return tuple(
            piece
            for parameter, slot in parameters
            for piece in pieces_of(parameter.sharding, slot, span, self.noise.tp)
        )

    def _update_in_one_kernel(
        self, shard: Shard, weights: Tensor, step: UpdateStep, iteration: int, measures: bool
    ) -> Tensor | None:
        assert self.kernels.update_range is not None
        rule, copies = self.updater.rule, self.policy.has_master and weights.dtype == torch.bfloat16
        keys = [self.noise.key("update", iteration, name=piece.name) for piece in shard.pieces]
        measured = self.kernels.update_range(
            self.updater.range_formula,
            rule.scalars(step, weight_decay=self.weight_decay),
            (shard.master, shard.states, shard.grads),
            UpdateTable.build(shard.pieces, keys).to(weights.device),
            grad_scale=step.grad_scale,
            rounding=self.policy.update_rounding,
            copy=weights if copies else None,
            variance=rule.states.index(EXP_AVG_SQ) if EXP_AVG_SQ in rule.states else None,
            measures=measures,
        )
        if self.policy.has_master and not copies:
            weights.copy_(shard.master)
        return measured

    def _directions(self, shard: Shard, step: UpdateStep) -> Tensor | None:
        """The step's direction for each element under a matrix-wise rule; None under others."""
        if not isinstance(self.updater.rule, MatrixRule) or not len(shard.grads):
            return None
        assert shard.gathered is not None, "matrices are gathered before the update"
        gathered, shard.gathered = shard.gathered, None
        parameters = [(parameter.sharding, slot) for parameter, slot in zip(self.parameters, self.plan.param_slots)]
        span = range(shard.span.start, shard.span.stop)
        return make_directions(
            self.updater.rule, gathered, parameters, span, grad_scale=step.grad_scale, tp_rank=self.noise.tp.rank
        )
