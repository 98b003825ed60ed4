"""Runs a configuration for a few steps and takes it apart into global tensors, so that layouts can be compared.

`run_rank` is one rank's part, whatever its transports; `assemble` puts the ranks' parts together: the gradient of every
parameter from the owned ranges, the weights from every replica (which must agree bit for bit).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel3d.optim.zero1 import Bucket
from parallel3d.sharding import ParamSharding
from parallel3d.testing.threads import ThreadWorld, run_threads
from parallel3d.topology.grid import Coordinates, Grid
from parallel3d.trainer.build import RankRuntime, Transports
from parallel3d.trainer.entry import Entry, TrainState
from parallel3d.trainer.step import evaluate, train_step

BuildRank = Callable[[int, Transports], RankRuntime]


@dataclass(kw_only=True)
class RankRun:
    """What one rank brings home."""

    place: Coordinates
    shardings: dict[str, ParamSharding]
    entries: list[Entry] = field(default_factory=list)
    grad_pieces: list[tuple[str, int, Tensor]] = field(default_factory=list)
    """(parameter, first local element, values) of the last step's gradient sums, as far as owned."""
    initial: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutRun:
    """A run in global terms; gradients are those of the last step's mean loss, before clipping."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    entries: tuple[Entry, ...]
    gradients: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    evaluation: float | None


def run_rank(rank: RankRuntime, num_steps: int) -> RankRun:
    """Runs `num_steps` iterations from the start and one evaluation."""
    run = RankRun(
        place=rank.place,
        shardings={p.sharding.name: p.sharding for b in rank.optimizer.buckets for p in b.parameters},
        initial=_weights(rank),
    )
    state = TrainState.start(rank.layout.num_slots)
    for _ in range(num_steps):
        state, report = train_step(rank, state)
        run.entries.append(report.entry)
    run.evaluation = evaluate(rank, state.iteration)
    run.weights = _weights(rank)
    run.grad_pieces = [piece for bucket in rank.optimizer.buckets for piece in _owned_pieces(bucket)]
    return run


def run_in_threads(grid: Grid, build: BuildRank, num_steps: int, *, slots: int = 3) -> LayoutRun:
    """Every rank of the grid as a thread."""

    def body(rank: int, world: ThreadWorld) -> RankRun:
        transports = Transports(make_group=world.make_group(rank), links=world.links(rank), token=world.tokens[rank])
        runtime = build(rank, transports)
        runtime.executor.observe = lambda step: world.doing(rank, str(step))
        return run_rank(runtime, num_steps)

    return assemble(run_threads(len(grid.ranks), body, world=ThreadWorld(len(grid.ranks), slots=slots)))


def assemble(runs: Sequence[RankRun]) -> LayoutRun:
    """The ranks' parts as one run; AssertionError when two that must agree do not."""
    first = runs[0]
    assert all(run.entries == first.entries for run in runs), "ranks hold different entries"
    assert all(run.evaluation == first.evaluation for run in runs), "ranks hold different evaluations"
    tp_size = 1 + max(run.place.tp for run in runs)
    scale = 1.0 / first.entries[-1].num_target_tokens
    return LayoutRun(
        losses=tuple(entry.loss for entry in first.entries),
        grad_norms=tuple(entry.grad_norm for entry in first.entries),
        entries=tuple(first.entries),
        gradients={name: grad * scale for name, grad in _join(_gradients(runs, tp_size), runs, tp_size).items()},
        initial=_join(_agreed([(run.place, run.initial) for run in runs]), runs, tp_size),
        weights=_join(_agreed([(run.place, run.weights) for run in runs]), runs, tp_size),
        evaluation=first.evaluation,
    )


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """max |a - b| / max |b| over the tensors, and the tensor where it is."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    differences = [
        ((ours[name] - theirs[name]).abs().max().item() / max(theirs[name].abs().max().item(), 1e-30), name)
        for name in theirs
    ]
    return max(differences)


def _weights(rank: RankRuntime) -> dict[str, Tensor]:
    rank.optimizer.finish_gather()
    return {p.sharding.name: p.detach().clone() for b in rank.optimizer.buckets for p in b.parameters}


def _owned_pieces(bucket: Bucket) -> list[tuple[str, int, Tensor]]:
    pieces = []
    for place in bucket.plan.places:
        begin = max(place.offset, bucket.owned.start)
        end = min(place.offset + place.length, bucket.owned.stop)
        if begin < end:
            values = bucket.owned_grads[begin - bucket.owned.start : end - bucket.owned.start]
            pieces.append((place.name, begin - place.offset, values.clone()))
    return pieces


def _gradients(runs: Sequence[RankRun], tp_size: int) -> dict[tuple[int, str], Tensor]:
    """Local gradients by (tp rank, parameter), every element set by its owner."""
    local: dict[tuple[int, str], Tensor] = {}
    for run in runs:
        for name, start, values in run.grad_pieces:
            shape = run.shardings[name].local_shape(tp_size)
            flat = local.setdefault((run.place.tp, name), torch.full(shape, float("nan"), dtype=values.dtype))
            flat.view(-1)[start : start + len(values)] = values
    assert not any(tensor.isnan().any() for tensor in local.values()), "some gradient has no owner"
    return local


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
                whole.narrow(sharding.dim, run.global_start, run.length).copy_(part)
        joined[name] = whole
    return joined
