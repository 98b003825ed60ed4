"""One training step, and one evaluation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from parallel3d.accelerator import is_accelerator
from parallel3d.config.schema import Config
from parallel3d.layers.micro_batch import BatchPlan
from parallel3d.monitor.memory import used_bytes
from parallel3d.parallel.host_numbers import HostNumbers
from parallel3d.pipeline.compute_clock import ComputeClock
from parallel3d.pipeline.executor import StageResult
from parallel3d.pipeline.planner import Plan
from parallel3d.precision.fixed_point import ExactSum
from parallel3d.trainer.batching import next_batch, plan_batch
from parallel3d.trainer.context import RankContext
from parallel3d.trainer.dumps import record_tensors, write_step_dump
from parallel3d.trainer.entry import NO_SAVE_STATUS, Contribution, Entry, EvaluationEntry, SaveStatus, UnitTime
from parallel3d.trainer.plans import num_micro_batches_at, unit_times
from parallel3d.trainer.replica_copies import is_check_due, replica_checksums, report_differences

NUM_TELEMETRY = 4
"""Numbers that each rank adds after its part of the entry: busy seconds, seconds of the lists, bytes, own seconds."""


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """Measurements of an iteration from all ranks; they travel with its entry but are not part of it."""

    bubble: float
    """Idle share of the pipeline's busiest rank."""
    memory_bytes: int
    """Bytes in use on the rank with the most."""
    own_s: tuple[float, ...] = ()
    """Of each rank of the grid, the busy seconds without waits for its tensor-parallel group, on a device with them; 0
    where they are unknown."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The outcome of a step: its entry, the learning rate of its update, this rank's time, all ranks' telemetry."""

    entry: Entry
    learning_rate: float
    step_s: float
    batch: BatchPlan
    telemetry: Telemetry
    plan: Plan
    warning: str = ""
    """Finding of the replica check, if the run continues in spite of it."""
    dump: Path | None = None
    """This rank's file of dumped tensors, if the step is to be dumped."""


def train_step(
    rank: RankContext,
    *,
    stop: bool = False,
    leave: bool = False,
    evaluate: bool = False,
    save_status: SaveStatus = NO_SAVE_STATUS,
) -> StepReport:
    """Runs one iteration: instruction lists, gradient reduction, the one all-reduce, apply, update.

    `stop` asks all ranks to stop after this step, `leave` asks that this rank may leave after it, `evaluate` asks for
    an evaluation after it; `save_status` is the state of this rank's part of the current save. With a non-finite
    gradient no rank updates.
    """
    started = time.perf_counter()
    batch, plan = next_batch(rank.config, rank.state), rank.plans.next(rank.state)
    num_micro_batches = num_micro_batches_at(plan, rank.coordinates)
    rank.optimizer.begin_iteration(batch.iteration, num_micro_batches, batch.loss_factor)
    rank.train_loader.begin(rank.state.cursors, rank.state.tokens_read)
    with record_tensors(rank, batch) as recorder:
        waited_s = rank.token.waited_s[rank.groups.tp.name]
        result = rank.executor.run(plan.lists.get(rank.coordinates.replica, ()), batch, rank.train_loader.load)
        result.tp_wait_s = rank.token.waited_s[rank.groups.tp.name] - waited_s
    rank.optimizer.finish_reduction()
    part = build_contribution(rank, result, stop=stop, leave=leave, evaluate=evaluate, save_status=save_status)
    entry, telemetry = all_reduce_entry(rank, batch, part, result)
    dump = None if recorder is None else write_step_dump(rank, entry, recorder)
    warning = report_differences(rank, batch.iteration) if entry.differing_stages else ""
    rank.state = rank.state.apply(entry)  # first: if the update is interrupted, recovery repeats it from the entry
    rank.optimizer.update(rank.state.iteration, rank.update_step())
    return StepReport(
        entry=entry,
        learning_rate=rank.learning_rate_now,
        step_s=time.perf_counter() - started,
        batch=batch,
        telemetry=telemetry,
        plan=plan,
        warning=warning,
        dump=dump,
    )


def build_contribution(
    rank: RankContext, result: StageResult, *, stop: bool, leave: bool, evaluate: bool, save_status: SaveStatus
) -> Contribution:
    """This rank's part of the entry; tensor-parallel rank 0 contributes what the whole replica knows."""
    optimizer, numbers, norms = rank.optimizer, HostNumbers(), None
    losses = numbers.add_all(result.losses.values())
    with (
        rank.token.waiting() if is_accelerator(rank.device) else nullcontext()
    ):  # on the device, NCCL may be waiting for peers
        squared_norm = optimizer.squared_norm(numbers)
        if measures_norms(rank.config, rank.state.iteration + 1):
            norms = optimizer.state_norms(numbers)
        numbers.read()  # the one wait for a device
    rank.token.check()
    part = Contribution(
        squared_norm=squared_norm(),
        is_finite=optimizer.is_finite,
        stop=stop,
        leave=leave,
        evaluate=evaluate,
        save_status=save_status,
        norms=None if norms is None else norms(),
        rank=rank.grid.ranks.index(rank.rank),
    )
    if rank.coordinates.tp == 0:
        part.loss_sum = ExactSum.of(losses())
        part.num_target_tokens = result.num_target_tokens
        part.cursors = rank.train_loader.next_cursors
        part.num_masked_tokens = sum(rank.train_loader.num_masked.values())
        virtual_stages = rank.chunk_layout.virtual_stages[rank.coordinates.pp]
        part.backward_counts = {(virtual_stages[c], m): count for (m, c), count in result.backwarded.items()}
    if is_check_due(rank, rank.state.iteration + 1):
        part.replica_check = replica_checksums(rank, rank.state.iteration + 1)
    return part


def all_reduce_entry(
    rank: RankContext, batch: BatchPlan, part: Contribution, result: StageResult
) -> tuple[Entry, Telemetry]:
    """The one all-reduce over all ranks of the grid: returns the entry and the telemetry.

    Times and bytes travel behind the entry's vector. They enter the entry only with `elastic.balance`, as the times of
    replicas, which choose routes and don't belong to the mathematics.
    """
    layout, grid, seconds = rank.layout.for_batch(batch), rank.grid, result.times()
    words, telemetry = layout.pack(part), np.zeros((len(grid.ranks), NUM_TELEMETRY))
    telemetry[grid.ranks.index(rank.rank)] = (
        seconds.busy_s,
        seconds.run_s,
        float(used_bytes(rank.device)),
        own_seconds(rank.device, rank.clock, seconds.busy_s, result.tp_wait_s),
    )
    vector = np.concatenate((words, telemetry.ravel()))
    work = rank.groups.world.all_reduce_async(torch.from_numpy(vector))  # in place
    rank.hooks.phase_hook("all_reduce")
    work.wait()
    busy_s, run_s, num_bytes, own_s = vector[len(words) :].reshape(-1, NUM_TELEMETRY).T.tolist()
    times: tuple[UnitTime, ...] = ()
    if rank.config.elastic.balance:
        known_s = {member: busy if own else 0.0 for member, busy, own in zip(grid.ranks, busy_s, own_s)}
        times = unit_times(grid, rank.plans.next(rank.state), known_s, batch.num_tokens)
    entry = layout.unpack(batch.iteration, vector[: len(words)], times)
    return entry, Telemetry(bubble=bubble_of(busy_s, run_s), memory_bytes=int(max(num_bytes)), own_s=tuple(own_s))


def own_seconds(device: torch.device, clock: ComputeClock, busy_s: float, tp_wait_s: float) -> float:
    """The seconds in which a rank has computed without waiting for its tensor-parallel group; 0 if they are unknown.

    A device's waits for the group are part of its computes: all of their time counts, and the group's ranks have about
    the same. Where only the host's clock was asked, it has timed the orders that a device was given.
    """
    if clock.is_of_device:
        return busy_s
    return 0.0 if is_accelerator(device) else max(0.0, busy_s - tp_wait_s)


def measures_norms(config: Config, iteration: int) -> bool:
    """Whether an iteration measures the norms of weights and second moments, before its update."""
    every = config.monitor.norms_every
    return every is not None and (iteration - 1) % every == 0


def bubble_of(busy: Sequence[float], run: Sequence[float]) -> float:
    """Measured bubble: 1 - (longest busy time) / (longest time for a list) over the ranks, in seconds.

    The lists begin together, after the previous all-reduce, and a list's time includes its waits: the longest one is
    the pipeline's. Reduction and update are outside of it, since no schedule can hide them.
    """
    busy_s, run_s = max(busy), max(run)
    return 1.0 - busy_s / run_s if run_s else 0.0


@torch.no_grad()
def evaluate(rank: RankContext) -> EvaluationEntry:
    """Evaluates and applies the result: the mean loss of a token over fixed sequences, the same on every layout.

    The loss is None without a validation text.
    """
    entry = EvaluationEntry(iteration=rank.state.iteration, loss=_evaluation_loss(rank))
    rank.state = rank.state.apply(entry)
    return entry


def _evaluation_loss(rank: RankContext) -> float | None:
    if rank.evaluate_loader is None:
        return None
    rank.optimizer.finish_gather()
    batch = plan_batch(rank.config, rank.state.iteration)  # full size, also during warmups
    num_micro_batches = rank.config.run.evaluate_batches * batch.num_micro_batches
    batch = replace(batch, num_micro_batches=num_micro_batches, training=False)
    rank.evaluate_loader.begin(((),) * batch.num_slots, 0)
    steps = rank.plans.evaluate(rank.state).lists.get(rank.coordinates.replica, ())
    result, numbers = rank.executor.run(steps, batch, rank.evaluate_loader.load), HostNumbers()
    losses = numbers.add_all(result.losses.values())
    with rank.token.waiting():
        numbers.read()
    rank.token.check()
    counts = rank.coordinates.tp == 0  # the other tensor-parallel ranks hold the same losses
    loss_sum = ExactSum.of(losses() if counts else ())
    num_masked = sum(rank.evaluate_loader.num_masked.values())  # by ranks of first stages, the rest by those of last
    num_tokens = result.num_target_tokens - num_masked if counts else 0
    sums = torch.tensor([*loss_sum.to_floats(), num_tokens], dtype=torch.float64)
    rank.hooks.phase_hook("evaluate")
    *loss_floats, num_tokens = rank.groups.world.all_reduce(sums).tolist()
    return ExactSum.from_floats(loss_floats).value / max(1.0, num_tokens)
