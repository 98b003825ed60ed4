"""One training step, and one evaluation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from parallel3d.data.lanes import Cursor
from parallel3d.pipeline.executor import StageResult
from parallel3d.precision.fixed_point import ExactSum
from parallel3d.trainer.build import RankRuntime
from parallel3d.trainer.dumps import record, write
from parallel3d.trainer.entry import NO_WORD, Contribution, Entry, EvaluationEntry, SaveWord
from parallel3d.trainer.replicas import is_due, replica_words, settle


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step gave: its entry, the learning rate of its update, this rank's seconds, and the pipeline's bubble."""

    entry: Entry
    learning_rate: float
    step_s: float
    bubble: float
    """Share of the pipeline's time in which its busiest rank does not compute."""
    warning: str = ""
    """What the replica check has found, where the run goes on."""
    dump: Path | None = None
    """This rank's file of the step's tensors, where they were asked for."""


def train_step(rank: RankRuntime, *, stop: bool = False, leave: bool = False, saved: SaveWord = NO_WORD) -> StepReport:
    """Runs one iteration: lists, reduction, the one all-reduce, fold, update. `rank.state` moves on with the fold.

    `stop` asks all ranks to stop after this step, `leave` that this one may depart then; `saved` is
    this rank's word on the save under way. An iteration with a
    non-finite gradient updates nothing, on all ranks alike.
    """
    started = time.perf_counter()
    batch = rank.train_batch(rank.state.iteration + 1)
    rank.optimizer.begin_iteration(batch.iteration, rank.num_micro_batches, batch.loss_factor)
    rank.train_loader.begin(rank.state.cursors)
    with record(rank, batch) as recorder:
        result = rank.executor.run(rank.train_plan.lists.get(rank.place.replica, ()), batch, rank.train_loader.load)
    rank.optimizer.finish_reduction()
    part = contribution(rank, result, stop=stop, leave=leave, saved=saved)
    entry, bubble = agree(rank, batch.iteration, part, result)
    dump = None if recorder is None else write(rank, entry, recorder)
    warning = settle(rank, batch.iteration) if entry.differing_stages else ""
    rank.state = rank.state.fold(entry)  # from here on this rank holds the entry, whatever happens to the update
    rank.optimizer.update(rank.state.iteration, rank.update_step())
    return StepReport(
        entry=entry,
        learning_rate=rank.learning_rate_now,
        step_s=time.perf_counter() - started,
        bubble=bubble,
        warning=warning,
        dump=dump,
    )


def contribution(rank: RankRuntime, result: StageResult, *, stop: bool, leave: bool, saved: SaveWord) -> Contribution:
    """This rank's part of the entry; what all ranks of a replica know is said by the first of them."""
    optimizer = rank.optimizer
    part = Contribution(
        squared_norm=optimizer.squared_norm(), is_finite=optimizer.is_finite, stop=stop, leave=leave, saved=saved
    )
    if rank.place.tp == 0:
        part.loss_sum = ExactSum.of(result.losses.values())
        part.num_target_tokens = result.num_target_tokens
        part.cursors = rank.train_loader.advanced
        num_stages = rank.grid.pp_size
        part.audit = {(c * num_stages + rank.place.pp, m): count for (m, c), count in result.backwarded.items()}
    if is_due(rank, rank.state.iteration + 1):
        part.check = replica_words(rank, rank.state.iteration + 1)
    return part


def agree(rank: RankRuntime, iteration: int, part: Contribution, result: StageResult) -> tuple[Entry, float]:
    """The one all-reduce over all ranks of the grid: the entry, and the iteration's bubble.

    Every rank's seconds ride behind what the entry is made of. They are never part of it: a replay is the same entry.
    """
    words, seconds = rank.layout.pack(part), [0.0] * (2 * len(rank.grid.ranks))
    place = 2 * rank.grid.ranks.index(rank.rank)
    seconds[place : place + 2] = result.busy_s, result.run_s
    vector = torch.tensor(words + seconds, dtype=torch.float64)
    work = rank.groups.world.all_reduce_async(vector)
    rank.probe("all_reduce")
    work.wait()
    total = vector.tolist()
    return rank.layout.unpack(iteration, total[: len(words)]), bubble_of(total[len(words) :])


def bubble_of(seconds: Sequence[float]) -> float:
    """1 - busy / run of the ranks' (busy, run) seconds, one after the other; the longest of each.

    Lists begin together, after the last iteration's all-reduce, and a rank's run includes its waits: the longest run is
    the pipeline's. Reduction and update, which no schedule can hide, are not in it; nor is what a rank computes for
    nobody but itself in between.
    """
    busy_s, run_s = max(seconds[::2]), max(seconds[1::2])
    return 1.0 - busy_s / run_s if run_s else 0.0


@torch.no_grad()
def evaluate(rank: RankRuntime) -> EvaluationEntry:
    """Mean loss of a token of the validation text: always the same sequences, the same result on every layout.

    The entry is folded into `rank.state`; its loss is None when there is no validation text.
    """
    entry = EvaluationEntry(iteration=rank.state.iteration, loss=_evaluation_loss(rank))
    rank.state = rank.state.fold(entry)
    return entry


def _evaluation_loss(rank: RankRuntime) -> float | None:
    if rank.evaluate_loader is None:
        return None
    rank.optimizer.finish_gather()
    batch = rank.train_batch(rank.state.iteration)
    num_micro_batches = rank.config.run.evaluate_batches * batch.num_micro_batches
    batch = replace(batch, num_micro_batches=num_micro_batches, training=False)
    rank.evaluate_loader.begin((Cursor.start(),) * batch.num_slots)
    steps = rank.evaluate_plan.lists.get(rank.place.replica, ())
    result = rank.executor.run(steps, batch, rank.evaluate_loader.load)
    speaks = rank.place.tp == 0
    loss_sum = ExactSum.of(result.losses.values() if speaks else ())
    sums = torch.tensor([*loss_sum.to_slots(), result.num_target_tokens * speaks], dtype=torch.float64)
    rank.probe("evaluate")
    *slots, num_tokens = rank.groups.world.all_reduce(sums).tolist()
    return ExactSum.from_slots(slots).value / num_tokens
