"""Runs a configuration for a few steps and takes it apart into global tensors, so that layouts can be compared.

`run_rank` is one rank's part, whatever its transports; `assemble` puts the ranks' parts together: the gradient of every
parameter from the owned ranges, the weights from every replica (which must agree bit for bit). trainer/compare.py says
how near two runs must be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallel3d.config.schema import Config, FaultConfig
from parallel3d.elastic.protocol.membership import Address, GenerationRecord
from parallel3d.errors import RunEnded
from parallel3d.inprocess.coordinator import ThreadCoordinator
from parallel3d.inprocess.world import RankDied, ThreadWorld, run_threads
from parallel3d.optim.bucket import Bucket
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Coordinates, Grid
from parallel3d.parallel.sharding import ParamSharding
from parallel3d.trainer.checkpointing import CheckpointSaver, NoSaver
from parallel3d.trainer.context import RankContext, Transports
from parallel3d.trainer.entry import Entry
from parallel3d.trainer.loop import Trainer
from parallel3d.trainer.plans import build_grid
from parallel3d.trainer.recovery import Network, RecoveryManager
from parallel3d.trainer.step import evaluate, train_step
from parallel3d.worker.faults import FaultInjector

BuildRank = Callable[[int, Transports], RankContext]

GradRange = tuple[str, int, Tensor]
"""(parameter, first local element, values) of the gradient sums over an iteration."""

TINY = 1e-30

LONGEST_RUN_S = 86_400.0
"""Deadlocks of threads are found at once, not by waiting."""


@dataclass(kw_only=True)
class RankResult:
    """What one rank brings home."""

    coordinates: Coordinates
    shardings: dict[str, ParamSharding]
    entries: list[Entry] = field(default_factory=list)
    grad_ranges: list[GradRange] = field(default_factory=list)
    """Of the last step, as far as owned."""
    first_grad_ranges: list[GradRange] = field(default_factory=list)
    """The same of the first step."""
    initial: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run in global terms; gradients are those of a step's mean loss, before clipping."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    entries: tuple[Entry, ...]
    gradients: Mapping[str, Tensor]
    """Of the last step."""
    first_gradients: Mapping[str, Tensor]
    """Of the first step, made with the initial weights; empty for an elastic run."""
    initial: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    evaluation: float | None


def run_rank(rank: RankContext, num_steps: int, on_step: Callable[[int], None] = lambda step: None) -> RankResult:
    """Runs `num_steps` iterations from the start and one evaluation; `on_step` is told of each step that is done."""
    run = RankResult(
        coordinates=rank.coordinates,
        shardings={p.sharding.name: p.sharding for b in rank.optimizer.buckets for p in b.parameters},
        initial=_weights(rank),
    )
    for _ in range(num_steps):
        run.entries.append(train_step(rank).entry)
        if len(run.entries) == 1:
            run.first_grad_ranges = _grad_ranges(rank)
        on_step(len(run.entries))
    run.evaluation = evaluate(rank).loss
    run.weights = _weights(rank)
    run.grad_ranges = _grad_ranges(rank)
    return run


def run_in_threads(
    grid: Grid,
    build: BuildRank,
    num_steps: int,
    *,
    slots: int = 3,
    on_step: Callable[[int], None] = lambda step: None,
) -> RunResult:
    """Every rank of the grid as a thread; `on_step` hears of the first rank's steps."""

    def body(rank: int, world: ThreadWorld) -> RankResult:
        transports = Transports(make_group=world.make_group(rank), links=world.links(rank), token=world.tokens[rank])
        runtime = build(rank, transports)
        runtime.executor.on_instruction = lambda step: world.doing(rank, str(step))
        return run_rank(runtime, num_steps, on_step if rank == grid.ranks[0] else lambda step: None)

    world = ThreadWorld(len(grid.ranks), slots=slots)
    return assemble_run(run_threads(len(grid.ranks), body, world=world, timeout_s=LONGEST_RUN_S))


@dataclass(kw_only=True)
class ElasticRunResult:
    """What is left of a run in threads after faults; `run` is None when it could not go on, for the reason `halted`."""

    run: RunResult | None
    steps: dict[int, dict[str, Any]]
    """The leader's record of every step."""
    num_changes: int
    """Committed changes of membership."""
    abort_reason: str
    dead: tuple[int, ...]
    moved_bytes: int
    num_tokens: int
    evaluations: Mapping[int, float] = field(default_factory=dict)
    """The leader's losses, by step."""
    notices: tuple[str, ...] = ()
    """What was told to a person, by whatever rank."""


class ThreadNetwork(Network):
    """Transports of a rank that is a thread."""

    def __init__(self, world: ThreadWorld, rank: int):
        self._world = world
        self._rank = rank

    def listen(self, generation: int) -> Address:
        return ("threads", generation)

    def transports(self, record: GenerationRecord, token: AbortToken) -> Transports:
        self._world.begin_generation(self._rank, token)
        links = self._world.links(self._rank, record.generation)
        return Transports(make_group=self._world.make_group(self._rank), links=links, token=token)


def run_elastic_in_threads(
    config: Config,
    prepare: Callable[[int, FaultInjector], RankContext],
    faults: Sequence[FaultConfig],
    *,
    save: Callable[[RankContext], CheckpointSaver] = lambda rank: NoSaver(),
    stop_at: int | None = None,
) -> ElasticRunResult:
    """Trains to the end of `config`, or to the step `stop_at`, with the real trainer, while `faults` take ranks out.

    `prepare(rank, probe)` makes a rank as `build.prepare_rank` does, `save` what saves for it.
    """
    grid = build_grid(config)
    world = ThreadWorld(len(grid.ranks), slots=config.parallel.p2p_slots)
    coordinator = ThreadCoordinator(
        world, grid, zero_stage=config.parallel.zero_stage, zero_backups=config.elastic.zero_backups
    )
    steps: dict[int, dict[str, Any]] = {}
    notices: list[str] = []
    evaluations: dict[int, float] = {}

    def publish(record: dict[str, Any]) -> None:
        if record["kind"] == "notice":
            notices.append(record["text"])
        if record["kind"] == "evaluation":
            evaluations[record["step"]] = record["loss"]
        if record["kind"] == "step" and record["step"] not in steps:
            steps[record["step"]] = record
            coordinator.protocol.last_reported_step = record["step"]

    def body(rank: int, world: ThreadWorld) -> RankResult | None:
        def act(kind: str) -> None:
            if kind == "term":
                coordinator.announce_drain(rank)
                return
            raise RankDied(f"rank {rank} dies")

        injector = FaultInjector(tuple(faults), rank, act)
        runtime = prepare(rank, injector)
        initial = {p.sharding.name: p.detach().clone() for b in runtime.optimizer.buckets for p in b.parameters}
        recovery = RecoveryManager(
            runtime, coordinator.memberships[rank], ThreadNetwork(world, rank), host="", publish=publish
        )
        trainer = Trainer(
            rank=runtime,
            recovery=recovery,
            publish=publish,
            stop_requested=lambda: stop_at is not None and runtime.state.iteration + 1 >= stop_at,
            saver=save(runtime),
            drain_requested=lambda: rank in coordinator.draining,
            on_phase=lambda phase, step: injector.begin_step(step),
        )
        try:
            is_here = trainer.run()
        except RankDied:
            coordinator.on_lost(rank, "killed")
            raise
        except RunEnded:
            return None
        if not is_here:
            return None
        return RankResult(
            coordinates=runtime.coordinates,
            shardings={p.sharding.name: p.sharding for b in runtime.optimizer.buckets for p in b.parameters},
            entries=list(runtime.state.entries),
            evaluation=runtime.state.evaluations[-1].loss if runtime.state.evaluations else None,
            initial=initial,
            weights={p.sharding.name: p.detach().clone() for b in runtime.optimizer.buckets for p in b.parameters},
            grad_ranges=_grad_ranges(runtime),
        )

    runs = [run for run in run_threads(len(grid.ranks), body, world=world) if run is not None]
    return ElasticRunResult(
        run=assemble_run(runs) if runs else None,
        steps=steps,
        num_changes=coordinator.protocol.num_changes,
        abort_reason=coordinator.abort_reason,
        dead=tuple(rank for rank in grid.ranks if rank not in coordinator.protocol.live),
        moved_bytes=coordinator.moved_bytes,
        num_tokens=max((record["tokens"] for record in steps.values()), default=0),
        evaluations=evaluations,
        notices=tuple(notices),
    )


def assemble_run(runs: Sequence[RankResult]) -> RunResult:
    """The ranks' parts as one run; AssertionError when two that must agree do not."""
    first = runs[0]
    assert all(run.entries == first.entries for run in runs), "ranks hold different entries"
    assert all(run.evaluation == first.evaluation for run in runs), "ranks hold different evaluations"
    tp_size = 1 + max(run.coordinates.tp for run in runs)
    return RunResult(
        losses=tuple(entry.loss for entry in first.entries),
        grad_norms=tuple(entry.grad_norm for entry in first.entries),
        entries=tuple(first.entries),
        gradients=_gradients(runs, tp_size, lambda run: run.grad_ranges, first.entries[-1]),
        first_gradients=_gradients(runs, tp_size, lambda run: run.first_grad_ranges, first.entries[0]),
        initial=_join(_agreed([(run.coordinates, run.initial) for run in runs]), runs, tp_size),
        weights=_join(_agreed([(run.coordinates, run.weights) for run in runs]), runs, tp_size),
        evaluation=first.evaluation,
    )


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest |a - b| / |b| of a tensor (Euclidean norms; infinite where something is not finite), and its name."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max((relative_difference(ours[name], theirs[name]), name) for name in theirs)


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """|a - b| / |b|; infinite where something is not finite."""
    distance, size = (torch.linalg.vector_norm(x, dtype=torch.float64).item() for x in (ours - theirs, theirs))
    return distance / max(size, TINY) if math.isfinite(distance) else math.inf


def _weights(rank: RankContext) -> dict[str, Tensor]:
    rank.optimizer.finish_gather()
    return {p.sharding.name: p.detach().clone() for b in rank.optimizer.buckets for p in b.parameters}


def _grad_ranges(rank: RankContext) -> list[GradRange]:
    return [piece for bucket in rank.optimizer.buckets for piece in _owned_grad_ranges(bucket)]


def _owned_grad_ranges(bucket: Bucket) -> list[GradRange]:
    pieces = []
    for param_slot in bucket.plan.param_slots:
        span = bucket.owned.span
        begin = max(param_slot.offset, span.start)
        end = min(param_slot.offset + param_slot.length, span.stop)
        if begin < end:
            values = bucket.owned.grads[begin - span.start : end - span.start]
            pieces.append((param_slot.name, begin - param_slot.offset, values.clone()))
    return pieces


def _gradients(
    runs: Sequence[RankResult], tp_size: int, ranges_of: Callable[[RankResult], list[GradRange]], entry: Entry
) -> dict[str, Tensor]:
    """Global gradients of the step's mean loss, every element set by its owner; none where no rank has kept any."""
    local: dict[tuple[int, str], Tensor] = {}
    for run in runs:
        for name, start, values in ranges_of(run):
            shape = run.shardings[name].local_shape(tp_size)
            flat = local.setdefault((run.coordinates.tp, name), torch.full(shape, float("nan"), dtype=values.dtype))
            flat.view(-1)[start : start + len(values)] = values
    if not local:
        return {}
    return {name: grad / entry.num_target_tokens for name, grad in _join(local, runs, tp_size).items()}


def _agreed(parts: Sequence[tuple[Coordinates, dict[str, Tensor]]]) -> dict[tuple[int, str], Tensor]:
    """Local tensors by (tp rank, parameter); all replicas must hold the same bits."""
    agreed: dict[tuple[int, str], Tensor] = {}
    for coordinates, tensors in parts:
        for name, tensor in tensors.items():
            known = agreed.setdefault((coordinates.tp, name), tensor)
            assert torch.equal(known, tensor), f"{name} differs between replicas ({coordinates})"
    return agreed


def _join(local: Mapping[tuple[int, str], Tensor], runs: Sequence[RankResult], tp_size: int) -> dict[str, Tensor]:
    """Global tensors from the tensor-parallel parts, padding left out."""
    shardings = {name: sharding for run in runs for name, sharding in run.shardings.items()}
    joined = {}
    for name, sharding in shardings.items():
        if sharding.dim is None:
            joined[name] = local[0, name]
            copies = (local[t, name] for t in range(1, tp_size))
            assert all(torch.equal(joined[name], copy) for copy in copies), f"{name} differs over the tp group"
            continue
        whole = torch.full(sharding.shape, float("nan"), dtype=local[0, name].dtype)
        for t in range(tp_size):
            for run in sharding.runs(t, tp_size):
                part = local[t, name].narrow(sharding.dim, run.local_start, run.length)
                target = whole.narrow(sharding.dim, run.global_start, run.length)
                is_copy = t % run.copies > 0
                assert not is_copy or torch.equal(target, part), f"{name} differs between copies (tp {t})"
                target.copy_(part)
        joined[name] = whole
    return joined
