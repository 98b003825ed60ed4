"""Compares two dumps of one step, on any layouts, and finds the first tensor that differs.

Parts are assembled to global tensors by their slabs; copies of a part on several ranks must agree too. Tensors come in
the order in which a step computes them, so that the first difference is the cause of the others: weights, activations
from the embedding to the loss, gradients of activations back to the embedding, gradients of parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.debug.dump import RankDump
from parallel3d.debug.slab import Slab

LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class GlobalTensor:
    """A tensor assembled from all ranks: float64, NaN where no rank had it."""

    name: str
    values: Tensor
    """(rows, columns)."""
    covered: Tensor
    """True where a rank had the element; bool, shaped like `values`."""
    copy_difference: float
    """Largest difference between two ranks' copies of an element."""
    position: tuple[int, int]
    """(depth, order), as in its slabs."""

    @property
    def section(self) -> str:
        is_parameter = self.position[1] < 0
        if self.name.endswith(".grad"):
            return "gradients" if is_parameter else "backward"
        return "weights" if is_parameter else "forward"


SECTIONS = ("weights", "forward", "backward", "gradients")


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """The difference of one tensor between two dumps."""

    name: str
    section: str
    largest: float
    """max |a - b|; infinite if only one of the two is a number."""
    relative: float
    """largest over max |b|."""
    where: tuple[int, int] | None
    """Row and column of the largest difference."""
    copy_difference: float
    """Largest difference between copies of an element within a dump, over max |b|."""
    complete: bool
    """Both dumps hold every element."""

    def is_same(self, tolerance: float) -> bool:
        return self.complete and max(self.relative, self.copy_difference) <= tolerance


def assemble_tensors(dumps: Sequence[RankDump]) -> dict[str, GlobalTensor]:
    """The global tensors of a step by name, in the order of computation."""
    parts: defaultdict[str, list[tuple[Slab, Tensor]]] = defaultdict(list)
    for dump in dumps:
        for slab, tensor in dump.tensors:
            parts[slab.name].append((slab, tensor))
    global_tensors = [_join(name, held) for name, held in parts.items()]
    return {global_tensor.name: global_tensor for global_tensor in sorted(global_tensors, key=_in_order)}


def mean_loss(dumps: Sequence[RankDump]) -> float | None:
    """Mean loss of a target token, in nats; None where no rank has recorded it."""
    losses = {slot: loss for dump in dumps for slot, loss in dump.losses.items()}
    return sum(losses.values()) / dumps[0].num_target_tokens if losses else None


def compare_tensors(ours: dict[str, GlobalTensor], theirs: dict[str, GlobalTensor]) -> Iterator[TensorComparison]:
    """Comparisons of the tensors in both dumps, in the order of computation."""
    for name, global_tensor in ours.items():
        if name in theirs:
            yield _compare(global_tensor, theirs[name])


def _in_order(global_tensor: GlobalTensor) -> tuple[int, int, int]:
    section = SECTIONS.index(global_tensor.section)
    sign = -1 if global_tensor.section in ("backward", "gradients") else 1
    depth, order = global_tensor.position
    return (section, sign * depth, sign * order)


def _join(name: str, held: Sequence[tuple[Slab, Tensor]]) -> GlobalTensor:
    first = held[0][0]
    flat = torch.full((first.shape[0] * first.shape[1],), float("nan"), dtype=torch.float64)
    covered, copy_difference = torch.zeros_like(flat, dtype=torch.bool), 0.0
    for slab, tensor in held:
        assert slab.shape == first.shape, f"{name}: {slab.shape} against {first.shape}"
        values, index = tensor.reshape(-1).double(), slab.index(tensor.numel())
        values, index = values[index >= 0], index[index >= 0]
        again = covered[index]
        if slab.is_partial_sum:
            flat[index[again]] += values[again]
        else:
            copy_difference = max(copy_difference, _largest(values[again], flat[index[again]])[0])
        flat[index[~again]] = values[~again]
        covered[index] = True
    return GlobalTensor(
        name=name,
        values=flat.view(first.shape),
        covered=covered.view(first.shape),
        copy_difference=copy_difference,
        position=min((slab.depth, slab.order) for slab, _ in held),
    )


def _compare(ours: GlobalTensor, theirs: GlobalTensor) -> TensorComparison:
    assert ours.values.shape == theirs.values.shape, f"{ours.name}: {ours.values.shape} and {theirs.values.shape}"
    both = ours.covered & theirs.covered
    largest, index = _largest(ours.values[both], theirs.values[both])
    known = theirs.values[both].abs().nan_to_num(0.0)
    scale = max(known.max().item() if len(known) else 0.0, 1e-30)
    row, column = both.nonzero()[index].tolist() if largest > 0 else (0, 0)
    return TensorComparison(
        name=ours.name,
        section=ours.section,
        largest=largest,
        relative=largest / scale,
        where=(row, column) if largest > 0 else None,
        copy_difference=max(ours.copy_difference, theirs.copy_difference) / scale,
        complete=bool(both.all()),
    )


def _largest(ours: Tensor, theirs: Tensor) -> tuple[float, int]:
    """max |a - b| and its index; equal infinities, and NaN against NaN, do not differ."""
    if not len(ours):
        return 0.0, 0
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    differences = torch.where(same, 0.0, (ours - theirs).abs()).nan_to_num(nan=float("inf"))
    index = int(differences.argmax())
    return differences[index].item(), index
