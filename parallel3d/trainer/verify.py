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

from parallel3d.comm.abort import AbortToken
from parallel3d.config.schema import Config, FaultConfig
from parallel3d.elastic.faults import FaultInjector
from parallel3d.elastic.membership import Address, EpochRecord
from parallel3d.elastic.thread_table import ThreadTable
from parallel3d.errors import RunEnded
from parallel3d.optim.bucket import Bucket
from parallel3d.sharding import ParamSharding
from parallel3d.testing.threads import RankDied, ThreadWorld, run_threads
from parallel3d.topology.grid import Coordinates, Grid
from parallel3d.trainer.build import RankRuntime, Transports, build_grid
from parallel3d.trainer.entry import Entry
from parallel3d.trainer.loop import Trainer
from parallel3d.trainer.recover import Member, Network
from parallel3d.trainer.saving import NoSaving, Saving
from parallel3d.trainer.step import evaluate, train_step

BuildRank = Callable[[int, Transports], RankRuntime]

GradPiece = tuple[str, int, Tensor]
"""(parameter, first local element, values) of the gradient sums over an iteration."""

TINY = 1e-30

LONGEST_RUN_S = 86_400.0
"""Deadlocks of threads are found at once, not by waiting."""


@dataclass(kw_only=True)
class RankRun:
    """What one rank brings home."""

    place: Coordinates
    shardings: dict[str, ParamSharding]
    entries: list[Entry] = field(default_factory=list)
    grad_pieces: list[GradPiece] = field(default_factory=list)
    """Of the last step, as far as owned."""
    first_grad_pieces: list[GradPiece] = field(default_factory=list)
    """The same of the first step."""
    initial: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutRun:
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


def run_rank(rank: RankRuntime, num_steps: int, on_step: Callable[[int], None] = lambda step: None) -> RankRun:
    """Runs `num_steps` iterations from the start and one evaluation; `on_step` is told of each step that is done."""
    run = RankRun(
        place=rank.place,
        shardings={p.sharding.name: p.sharding for b in rank.optimizer.buckets for p in b.parameters},
        initial=_weights(rank),
    )
    for _ in range(num_steps):
        run.entries.append(train_step(rank).entry)
        if len(run.entries) == 1:
            run.first_grad_pieces = _grad_pieces(rank)
        on_step(len(run.entries))
    run.evaluation = evaluate(rank).loss
    run.weights = _weights(rank)
    run.grad_pieces = _grad_pieces(rank)
    return run


def run_in_threads(
    grid: Grid,
    build: BuildRank,
    num_steps: int,
    *,
    slots: int = 3,
    on_step: Callable[[int], None] = lambda step: None,
) -> LayoutRun:
    """Every rank of the grid as a thread; `on_step` hears of the first rank's steps."""

    def body(rank: int, world: ThreadWorld) -> RankRun:
        transports = Transports(make_group=world.make_group(rank), links=world.links(rank), token=world.tokens[rank])
        runtime = build(rank, transports)
        runtime.executor.observe = lambda step: world.doing(rank, str(step))
        return run_rank(runtime, num_steps, on_step if rank == grid.ranks[0] else lambda step: None)

    world = ThreadWorld(len(grid.ranks), slots=slots)
    return assemble(run_threads(len(grid.ranks), body, world=world, timeout_s=LONGEST_RUN_S))


@dataclass(kw_only=True)
class ElasticRun:
    """What is left of a run in threads after faults; `run` is None when it could not go on, for the reason `halted`."""

    run: LayoutRun | None
    steps: dict[int, dict[str, Any]]
    """The leader's record of every step."""
    num_changes: int
    """Committed changes of membership."""
    halted: str
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

    def listen(self, epoch: int) -> Address:
        return ("threads", epoch)

    def transports(self, record: EpochRecord, token: AbortToken) -> Transports:
        self._world.begin_epoch(self._rank, token)
        links = self._world.links(self._rank, record.epoch)
        return Transports(make_group=self._world.make_group(self._rank), links=links, token=token)


def run_elastic_in_threads(
    config: Config,
    prepare: Callable[[int, FaultInjector], RankRuntime],
    faults: Sequence[FaultConfig],
    *,
    save: Callable[[RankRuntime], Saving] = lambda rank: NoSaving(),
    stop_at: int | None = None,
) -> ElasticRun:
    """Trains to the end of `config`, or to the step `stop_at`, with the real trainer, while `faults` take ranks out.

    `prepare(rank, probe)` makes a rank as `build.prepare_rank` does, `save` what saves for it.
    """
    grid = build_grid(config)
    world = ThreadWorld(len(grid.ranks), slots=config.parallel.p2p_slots)
    table = ThreadTable(world, grid, zero_stage=config.parallel.zero_stage, zero_backups=config.elastic.zero_backups)
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
            table.protocol.last_told = record["step"]

    def body(rank: int, world: ThreadWorld) -> RankRun | None:
        def act(kind: str) -> None:
            if kind == "term":
                table.ask_to_leave(rank)
                return
            raise RankDied(f"rank {rank} dies")

        injector = FaultInjector(tuple(faults), rank, act)
        runtime = prepare(rank, injector)
        initial = {p.sharding.name: p.detach().clone() for b in runtime.optimizer.buckets for p in b.parameters}
        member = Member(runtime, table.seats[rank], ThreadNetwork(world, rank), host="", publish=publish)
        trainer = Trainer(
            rank=runtime,
            member=member,
            publish=publish,
            stop_requested=lambda: stop_at is not None and runtime.state.iteration + 1 >= stop_at,
            saving=save(runtime),
            leave_requested=lambda: rank in table.departing,
            on_phase=lambda phase, step: injector.begin_step(step),
        )
        try:
            is_here = trainer.run()
        except RankDied:
            table.lose(rank, "killed")
            raise
        except RunEnded:
            return None
        if not is_here:
            return None
        return RankRun(
            place=runtime.place,
            shardings={p.sharding.name: p.sharding for b in runtime.optimizer.buckets for p in b.parameters},
            entries=list(runtime.state.entries),
            evaluation=runtime.state.evaluations[-1].loss if runtime.state.evaluations else None,
            initial=initial,
            weights={p.sharding.name: p.detach().clone() for b in runtime.optimizer.buckets for p in b.parameters},
            grad_pieces=_grad_pieces(runtime),
        )

    runs = [run for run in run_threads(len(grid.ranks), body, world=world) if run is not None]
    return ElasticRun(
        run=assemble(runs) if runs else None,
        steps=steps,
        num_changes=table.protocol.num_changes,
        halted=table.halted,
        dead=tuple(rank for rank in grid.ranks if rank not in table.protocol.live),
        moved_bytes=table.moved_bytes,
        num_tokens=max((record["tokens"] for record in steps.values()), default=0),
        evaluations=evaluations,
        notices=tuple(notices),
    )


def assemble(runs: Sequence[RankRun]) -> LayoutRun:
    """The ranks' parts as one run; AssertionError when two that must agree do not."""
    first = runs[0]
    assert all(run.entries == first.entries for run in runs), "ranks hold different entries"
    assert all(run.evaluation == first.evaluation for run in runs), "ranks hold different evaluations"
    tp_size = 1 + max(run.place.tp for run in runs)
    return LayoutRun(
        losses=tuple(entry.loss for entry in first.entries),
        grad_norms=tuple(entry.grad_norm for entry in first.entries),
        entries=tuple(first.entries),
        gradients=_gradients(runs, tp_size, lambda run: run.grad_pieces, first.entries[-1]),
        first_gradients=_gradients(runs, tp_size, lambda run: run.first_grad_pieces, first.entries[0]),
        initial=_join(_agreed([(run.place, run.initial) for run in runs]), runs, tp_size),
        weights=_join(_agreed([(run.place, run.weights) for run in runs]), runs, tp_size),
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


def _weights(rank: RankRuntime) -> dict[str, Tensor]:
    rank.optimizer.finish_gather()
    return {p.sharding.name: p.detach().clone() for b in rank.optimizer.buckets for p in b.parameters}


def _grad_pieces(rank: RankRuntime) -> list[GradPiece]:
    return [piece for bucket in rank.optimizer.buckets for piece in _owned_pieces(bucket)]


def _owned_pieces(bucket: Bucket) -> list[GradPiece]:
    pieces = []
    for place in bucket.plan.places:
        span = bucket.owned.span
        begin = max(place.offset, span.start)
        end = min(place.offset + place.length, span.stop)
        if begin < end:
            values = bucket.owned.grads[begin - span.start : end - span.start]
            pieces.append((place.name, begin - place.offset, values.clone()))
    return pieces


def _gradients(
    runs: Sequence[RankRun], tp_size: int, pieces_of: Callable[[RankRun], list[GradPiece]], entry: Entry
) -> dict[str, Tensor]:
    """Global gradients of the step's mean loss, every element set by its owner; none where no rank has kept any."""
    local: dict[tuple[int, str], Tensor] = {}
    for run in runs:
        for name, start, values in pieces_of(run):
            shape = run.shardings[name].local_shape(tp_size)
            flat = local.setdefault((run.place.tp, name), torch.full(shape, float("nan"), dtype=values.dtype))
            flat.view(-1)[start : start + len(values)] = values
    if not local:
        return {}
    return {name: grad / entry.num_target_tokens for name, grad in _join(local, runs, tp_size).items()}


def _agreed(parts: Sequence[tuple[Coordinates, dict[str, Tensor]]]) -> dict[tuple[int, str], Tensor]:
    """Local tensors by (tp rank, parameter); all replicas must hold the same bits."""
    agreed: dict[tuple[int, str], Tensor] = {}
    for place, tensors in parts:
        for name, tensor in tensors.items():
            known = agreed.setdefault((place.tp, name), tensor)
            assert torch.equal(known, tensor), f"{name} differs between replicas ({place})"
    return agreed


def _join(local: Mapping[tuple[int, str], Tensor], runs: Sequence[RankRun], tp_size: int) -> dict[str, Tensor]:
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
                place = whole.narrow(sharding.dim, run.global_start, run.length)
                is_copy = t % run.copies > 0
                assert not is_copy or torch.equal(place, part), f"{name} differs between copies (tp {t})"
                place.copy_(part)
        joined[name] = whole
    return joined
