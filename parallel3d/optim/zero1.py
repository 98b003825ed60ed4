"""Flat buckets of weights and main gradients, their reduction, and AdamW on the part that this rank owns.

ZeRO stage 1 (Rajbhandari et al. 2020): each data-parallel rank owns one range of every bucket. Gradients are
reduce-scattered to the owners, updated there, and the weights gathered again::

    bucket on each rank   [ range 0 | range 1 | range 2 | range 3 ]
    reduce-scatter                    ^ rank 1 gets the sum of range 1, holds its moments (and master weights)
    update                            with them
    all-gather            every rank gets every range back

With zero_stage 0 the one range is the whole bucket, on every rank: all-reduce, update, nothing to gather.

Reductions start while the last backward pass runs, as soon as a bucket has all of its gradients, in bucket order, which
is the same on every rank. Gathers may run on under the next forward pass: a module waits for its own buckets. Neither
changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel3d.comm.group import DoneWork, Group, Work
from parallel3d.layers.init import initial_value
from parallel3d.layers.parameter import ShardedParameter, parameters_of
from parallel3d.optim.buckets import BucketPlan, plan_buckets
from parallel3d.precision.policy import Policy


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """AdamW's constants (Loshchilov and Hutter 2019); the learning rate comes with each update."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


class Bucket:
    """One bucket on this rank: flat weights and gradients, whose views are the parameters' data and main gradients."""

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[ShardedParameter],
        *,
        initial: Callable[[ShardedParameter], Tensor],
        owned: range,
        policy: Policy,
        settings: AdamWSettings,
        device: torch.device,
    ):
        self.plan = plan
        self.owned = slice(owned.start, owned.stop)
        self.parameters = tuple(parameters)
        wide = torch.zeros(plan.length, dtype=policy.state, device=device)
        self.weights = torch.zeros(plan.length, dtype=policy.compute, device=device)
        self.grads = torch.zeros(plan.length, dtype=policy.grad, device=device)
        for parameter, place in zip(parameters, plan.places):
            span = slice(place.offset, place.offset + place.length)
            wide[span] = initial(parameter).reshape(-1)
            parameter.data = self.weights[span].view(place.shape)
            parameter.main_grad = self.grads[span].view(place.shape)
        self.weights.copy_(wide)
        self.owned_weights = self.weights[self.owned]
        self.master = wide[self.owned].clone() if policy.has_master else self.owned_weights
        # Its own memory: a reduce-scatter must not write into what it reads.
        self.owned_grads = self.grads if len(owned) == plan.length else torch.zeros_like(self.grads[self.owned])
        self.optimizer = torch.optim.AdamW(
            [nn.Parameter(self.master)],
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay if plan.key.decay else 0.0,
            fused=True,
        )

    def state_bytes(self) -> int:
        """Bytes of moments and master weights on this rank."""
        has_own_master = self.master.data_ptr() != self.owned_weights.data_ptr()
        return (2 + has_own_master) * self.master.numel() * self.master.element_size()

    def update(self, *, learning_rate: float, grad_scale: float) -> None:
        """One AdamW step on the owned range with the owned gradients times `grad_scale`."""
        (parameter,) = self.optimizer.param_groups[0]["params"]
        parameter.grad = self.owned_grads.to(self.master.dtype).mul_(grad_scale)
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()
        parameter.grad = None
        if self.master is not self.owned_weights:
            self.owned_weights.copy_(self.master)


class ShardedOptimizer:
    """All buckets of one rank: built with the initial weights, then reduce -> update -> gather in each iteration."""

    def __init__(
        self,
        stage: nn.Module,
        *,
        seed: int,
        tp: Group,
        dp: Group,
        zero_stage: int,
        bucket_bytes: int,
        decay_norms_and_biases: bool,
        policy: Policy,
        settings: AdamWSettings,
        overlap_reduce: bool,
        overlap_gather: bool,
        device: torch.device,
    ):
        self._tp, self._dp = tp, dp
        self._is_sharded = zero_stage == 1
        self._overlap_reduce, self._overlap_gather = overlap_reduce, overlap_gather
        parameters = {p.sharding.name: p for p in parameters_of(stage)}
        num_ranges, number = (dp.size, dp.rank) if self._is_sharded else (1, 0)
        plans = plan_buckets(
            [p.sharding for p in parameters.values()],
            tp_size=tp.size,
            num_ranges=num_ranges,
            bucket_elements=max(1, bucket_bytes // policy.grad.itemsize),
            decay_norms_and_biases=decay_norms_and_biases,
        )
        self.buckets = [
            Bucket(
                plan,
                [parameters[place.name] for place in plan.places],
                initial=lambda p: initial_value(p.sharding, seed=seed, tp_rank=tp.rank, tp_size=tp.size),
                owned=plan.range_of(number, num_ranges),
                policy=policy,
                settings=settings,
                device=device,
            )
            for plan in plans
        ]
        self._reducing: list[Work] = []
        self._gathering: dict[int, Work] = {}
        self._missing: list[int] = []
        self._is_armed = False
        self._watch_gradients()
        self._wait_in_front_of(stage)

    def begin_iteration(self) -> None:
        """Clears the gradients and whatever an earlier iteration left unfinished."""
        self._is_armed = False
        self._reducing = []
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.grads.zero_()

    def expect_last_backward(self) -> None:
        """From now on a bucket whose parameters all got their gradient starts its reduction."""
        self._is_armed = self._overlap_reduce

    def finish_reduction(self) -> None:
        """Starts what has not started, then waits: afterwards `owned_grads` are sums over all micro-batches."""
        while len(self._reducing) < len(self.buckets):
            self._start_reduction()
        for work in self._reducing:
            work.wait()

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared gradient norm, float64: each element of the model counts on one rank only."""
        total = torch.zeros((), dtype=torch.float64)
        for bucket in self.buckets:
            if self._counts(bucket):
                total += torch.linalg.vector_norm(bucket.owned_grads).double().square().cpu()
        return total

    def update(self, *, learning_rate: float, grad_scale: float) -> None:
        """AdamW on the owned ranges, then starts the gathers."""
        for index in reversed(range(len(self.buckets))):  # forward order: the first layers are needed first
            bucket = self.buckets[index]
            bucket.update(learning_rate=learning_rate, grad_scale=grad_scale)
            if self._is_sharded:
                self._gathering[index] = self._dp.all_gather_async(bucket.weights, bucket.owned_weights)
        if not self._overlap_gather:
            self.finish_gather()

    def finish_gather(self) -> None:
        """Waits until all weights are whole."""
        for index in list(self._gathering):
            self._gathering.pop(index).wait()

    def state_bytes(self) -> int:
        return sum(bucket.state_bytes() for bucket in self.buckets)

    def _counts(self, bucket: Bucket) -> bool:
        return (self._tp.rank == 0 or not bucket.plan.key.tp_replicated) and (self._is_sharded or self._dp.rank == 0)

    def _watch_gradients(self) -> None:
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                parameter.on_grad = lambda index=index: self._on_grad(index)

    def _on_grad(self, index: int) -> None:
        if not self._is_armed:
            return
        self._missing[index] -= 1
        while len(self._reducing) < len(self.buckets) and self._missing[len(self._reducing)] == 0:
            self._start_reduction()

    def _start_reduction(self) -> None:
        """Of the next bucket in order; partial sums are finished inside the replica first."""
        bucket = self.buckets[len(self._reducing)]
        if bucket.plan.key.partial_grad:
            self._tp.all_reduce(bucket.grads)
        self._reducing.append(
            self._dp.reduce_scatter_async(bucket.owned_grads, bucket.grads)
            if self._is_sharded
            else self._dp.all_reduce_async(bucket.grads)
        )

    def _wait_in_front_of(self, stage: nn.Module) -> None:
        """Every module that owns parameters waits for their buckets before its forward pass."""
        bucket_of = {id(p): i for i, bucket in enumerate(self.buckets) for p in bucket.parameters}
        for module in stage.modules():
            indices = sorted({bucket_of[id(p)] for p in module.parameters(recurse=False)})
            if indices:
                module.register_forward_pre_hook(lambda _module, _args, indices=indices: self._wait_for(indices))

    def _wait_for(self, indices: list[int]) -> None:
        for index in indices:
            self._gathering.pop(index, _DONE).wait()


_DONE = DoneWork()
