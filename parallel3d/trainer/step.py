"""One training step, and one evaluation."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from parallel3d.data.lanes import Cursor
from parallel3d.pipeline.executor import StageResult
from parallel3d.trainer.build import RankRuntime
from parallel3d.trainer.entry import Contribution, Entry, TrainState


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step gave: its entry, the learning rate of its update, and this rank's seconds."""

    entry: Entry
    learning_rate: float
    step_s: float
    busy_s: float


def train_step(rank: RankRuntime, state: TrainState, *, stop: bool = False) -> tuple[TrainState, StepReport]:
    """Runs one iteration: lists, reduction, the one all-reduce, fold, update. Returns the new state and a report.

    `stop` asks all ranks to leave after this step. An iteration with a non-finite gradient updates nothing, on all
    ranks alike.
    """
    started = time.perf_counter()
    batch = rank.train_batch(state.iteration + 1)
    rank.optimizer.begin_iteration()
    rank.train_loader.begin(state.cursors)
    result = rank.executor.run(
        rank.train_plan.lists.get(rank.place.replica, ()),
        batch,
        rank.train_loader.load,
        before_last_backward=rank.optimizer.expect_last_backward,
    )
    rank.optimizer.finish_reduction()
    entry = agree(rank, batch.iteration, contribution(rank, result, stop=stop))
    state = state.fold(entry)
    learning_rate = rank.learning_rate.at(state.num_updates)
    if entry.finite:
        rank.optimizer.update(
            learning_rate=learning_rate, grad_scale=entry.grad_scale(rank.config.optimizer.max_grad_norm)
        )
    report = StepReport(
        entry=entry, learning_rate=learning_rate, step_s=time.perf_counter() - started, busy_s=result.busy_s
    )
    return state, report


def contribution(rank: RankRuntime, result: StageResult, *, stop: bool) -> Contribution:
    """This rank's part of the entry; what all ranks of a replica know is said by the first of them."""
    part = Contribution(squared_norm=rank.optimizer.squared_norm().item(), stop=stop)
    if rank.place.tp == 0:
        part.loss_sum = result.loss_sum
        part.num_target_tokens = result.num_target_tokens
        part.cursors = rank.train_loader.advanced
        part.audit = {(rank.place.pp, m): count for m, count in result.backwarded.items()}
    return part


def agree(rank: RankRuntime, iteration: int, part: Contribution) -> Entry:
    """The one all-reduce over all ranks of the grid."""
    vector = torch.tensor(rank.layout.pack(part), dtype=torch.float64)
    return rank.layout.unpack(iteration, rank.groups.world.all_reduce(vector).tolist())


@torch.no_grad()
def evaluate(rank: RankRuntime, iteration: int) -> float | None:
    """Mean loss of a token of the validation text: always the same sequences, the same result on every layout.

    None when there is no validation text.
    """
    if rank.evaluate_loader is None:
        return None
    rank.optimizer.finish_gather()
    batch = rank.train_batch(iteration)
    num_micro_batches = rank.config.run.evaluate_batches * batch.num_micro_batches
    batch = replace(batch, num_micro_batches=num_micro_batches, training=False)
    rank.evaluate_loader.begin((Cursor.start(),) * batch.num_slots)
    steps = rank.evaluate_plan.lists.get(rank.place.replica, ())
    result = rank.executor.run(steps, batch, rank.evaluate_loader.load)
    speaks = rank.place.tp == 0
    sums = torch.tensor([result.loss_sum * speaks, result.num_target_tokens * speaks], dtype=torch.float64)
    loss_sum, num_tokens = rank.groups.world.all_reduce(sums).tolist()
    return loss_sum / num_tokens
