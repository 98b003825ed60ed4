"""Results of a run: per rank, and assembled into global tensors, so that runs on different layouts can be compared.

`assemble_run` takes the gradient of every parameter from the ranges that ranks own, and the weights from every replica,
which must agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel3d.parallel.grid import Coordinates
from parallel3d.parallel.sharding import ParamSharding, TpShard
from parallel3d.trainer.entry import Entry

GradRange = tuple[str, int, Tensor]
"""(parameter, first local element, values) of the gradient sums over an iteration."""


@dataclass(kw_only=True)
class RankResult:
    """One rank's share of a run's result."""

    coordinates: Coordinates
    shardings: dict[str, ParamSharding]
    entries: list[Entry] = field(default_factory=list)
    grad_ranges: list[GradRange] = field(default_factory=list)
    """Owned ranges of the last step's gradients."""
    first_grad_ranges: list[GradRange] = field(default_factory=list)
    """Owned ranges of the first step's gradients."""
    initial: dict[str, Tensor] = field(default_factory=dict)
    """Empty for a rank that joined the run later: it got its weights from others."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run's result in global tensors; gradients are those of a step's mean loss, before clipping."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    entries: tuple[Entry, ...]
    gradients: Mapping[str, Tensor]
    """Of the last step."""
    first_gradients: Mapping[str, Tensor]
    """Of the first step, from the initial weights; empty for an elastic run."""
    initial: Mapping[str, Tensor]
    """Empty for a run that ranks have joined."""
    weights: Mapping[str, Tensor]
    evaluation: float | None


def assemble_run(runs: Sequence[RankResult]) -> RunResult:
    """Assembles the ranks' results; raises AssertionError if two that must agree do not."""
    first = runs[0]
    assert all(run.entries == first.entries for run in runs), "ranks hold different entries"
    assert all(run.evaluation == first.evaluation for run in runs), "ranks hold different evaluations"
    tp_size = 1 + max(run.coordinates.tp for run in runs)
    starts = [(run.coordinates, run.initial) for run in runs]
    return RunResult(
        losses=tuple(entry.loss for entry in first.entries),
        grad_norms=tuple(entry.grad_norm for entry in first.entries),
        entries=tuple(first.entries),
        gradients=_gradients(runs, tp_size, lambda run: run.grad_ranges, first.entries[-1]),
        first_gradients=_gradients(runs, tp_size, lambda run: run.first_grad_ranges, first.entries[0]),
        initial=_join(_agreed(starts), runs, tp_size) if all(run.initial for run in runs) else {},
        weights=_join(_agreed([(run.coordinates, run.weights) for run in runs]), runs, tp_size),
        evaluation=first.evaluation,
    )


def _gradients(
    runs: Sequence[RankResult], tp_size: int, ranges_of: Callable[[RankResult], list[GradRange]], entry: Entry
) -> dict[str, Tensor]:
    """Returns global gradients of the step's mean loss, each element from its owner; {} if no rank has any."""
    local: dict[tuple[int, str], Tensor] = {}
    for run in runs:
        for name, start, values in ranges_of(run):
            shape = run.shardings[name].local_shape(tp_size)
            flat = local.setdefault((run.coordinates.tp, name), torch.full(shape, float("nan"), dtype=values.dtype))
            flat.view(-1)[start : start + len(values)] = values
    if not local:
        return {}
    return {name: grad / entry.num_loss_tokens for name, grad in _join(local, runs, tp_size).items()}


def _agreed(parts: Sequence[tuple[Coordinates, dict[str, Tensor]]]) -> dict[tuple[int, str], Tensor]:
    """Returns local tensors by (tp rank, parameter); all replicas must hold the same bits."""
    agreed: dict[tuple[int, str], Tensor] = {}
    for coordinates, tensors in parts:
        for name, tensor in tensors.items():
            known = agreed.setdefault((coordinates.tp, name), tensor)
            assert torch.equal(known, tensor), f"{name} differs between replicas ({coordinates})"
    return agreed


def _join(local: Mapping[tuple[int, str], Tensor], runs: Sequence[RankResult], tp_size: int) -> dict[str, Tensor]:
    """Returns global tensors from the tensor-parallel parts, without padding."""
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
            for run in sharding.runs(TpShard(rank=t, size=tp_size)):
                part = local[t, name].narrow(sharding.dim, run.local_start, run.length)
                target = whole.narrow(sharding.dim, run.global_start, run.length)
                is_copy = t % run.copies > 0
                assert not is_copy or torch.equal(target, part), f"{name} differs between copies (tp {t})"
                target.copy_(part)
        joined[name] = whole
    return joined
