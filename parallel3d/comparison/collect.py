"""Trains one rank for a few steps and collects its result, whatever its transports."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from parallel3d.comparison.run_result import GradRange, RankResult
from parallel3d.optim.bucket import Bucket
from parallel3d.parallel.sharding import ParamSharding
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.step import evaluate, train_step


def run_rank(rank: RankContext, num_steps: int, on_step: Callable[[int], None] = lambda step: None) -> RankResult:
    """Runs `num_steps` iterations from the start and one evaluation; calls `on_step` after each step."""
    run = RankResult(
        coordinates=rank.coordinates,
        shardings=shardings(rank),
        initial=gathered_weights(rank),
    )
    for _ in range(num_steps):
        run.entries.append(train_step(rank).entry)
        if len(run.entries) == 1:
            run.first_grad_ranges = owned_grad_ranges(rank)
        on_step(len(run.entries))
    run.evaluation = evaluate(rank).loss
    run.weights = gathered_weights(rank)
    run.grad_ranges = owned_grad_ranges(rank)
    return run


def shardings(rank: RankContext) -> dict[str, ParamSharding]:
    return {p.sharding.name: p.sharding for b in rank.optimizer.buckets for p in b.parameters}


def gathered_weights(rank: RankContext) -> dict[str, Tensor]:
    """Waits for the gathering of weights and returns copies of them."""
    rank.optimizer.finish_gather()
    return local_weights(rank)


def local_weights(rank: RankContext) -> dict[str, Tensor]:
    """Returns copies of this rank's weights, which must be gathered."""
    return {p.sharding.name: p.detach().clone() for b in rank.optimizer.buckets for p in b.parameters}


def owned_grad_ranges(rank: RankContext) -> list[GradRange]:
    """Returns copies of the gradient ranges that this rank owns."""
    return [grad_range for bucket in rank.optimizer.buckets for grad_range in _owned_in_bucket(bucket)]


def _owned_in_bucket(bucket: Bucket) -> list[GradRange]:
    ranges = []
    for param_slot in bucket.plan.param_slots:
        span = bucket.owned.span
        begin = max(param_slot.offset, span.start)
        end = min(param_slot.offset + param_slot.length, span.stop)
        if begin < end:
            values = bucket.owned.grads[begin - span.start : end - span.start]
            ranges.append((param_slot.name, begin - param_slot.offset, values.clone()))
    return ranges
