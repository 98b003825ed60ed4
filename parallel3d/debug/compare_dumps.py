"""Compares two dumps of one step, on any layouts, and finds the first tensor that differs.

Parts are assembled to global tensors by their slabs; copies of a part on several ranks must agree too. Tensors come in
the order in which a step computes them, so that the first difference is the cause of the others: weights, activations
from the embedding to the loss, gradients of activations back to the embedding, gradients of parameters.

The files are mapped into memory, and one tensor of each dump is assembled at a time: memory is a few times the largest
tensor, whatever the size of the dumps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.debug.dump import RankDump
from parallel3d.debug.slab import Slab

LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class GlobalTensor:
    """A tensor assembled from all ranks: float64, NaN where no rank had it."""

    values: Tensor
    """(rows, columns)."""
    covered: Tensor
    """True where a rank had the element; bool, shaped like `values`."""
    copy_difference: float
    """Largest difference between two ranks' copies of an element."""


@dataclass(frozen=True, kw_only=True)
class DumpedTensor:
    """The parts of a tensor in the dumps of all ranks."""

    name: str
    parts: Sequence[tuple[Slab, Tensor]]

    @property
    def position(self) -> tuple[int, int]:
        """(depth, order) of its first part."""
        return min((slab.depth, slab.order) for slab, _ in self.parts)

    @property
    def section(self) -> str:
        is_parameter = self.position[1] < 0
        if self.name.endswith(".grad"):
            return "gradients" if is_parameter else "backward"
        return "weights" if is_parameter else "forward"

    def assemble(self) -> GlobalTensor:
        shape = self.parts[0][0].shape
        values = torch.full(shape, float("nan"), dtype=torch.float64)
        covered, copy_difference = torch.zeros(shape, dtype=torch.bool), 0.0
        for slab, tensor in self.parts:
            assert slab.shape == shape, f"{self.name}: {slab.shape} against {shape}"
            for where, block in slab.blocks(tensor):
                known = covered[where]
                if not known.any():
                    values[where] = block.double()
                elif slab.is_partial_sum:
                    values[where] = block.double() + values[where].where(known, 0.0)
                else:
                    copy_difference = max(copy_difference, _largest(block.double(), values[where], known)[0])
                    values[where] = values[where].where(known, block.double())
                covered[where] = True
        return GlobalTensor(values=values, covered=covered, copy_difference=copy_difference)


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


def dumped_tensors(dumps: Sequence[RankDump]) -> dict[str, DumpedTensor]:
    """The tensors of a step by name, in the order of computation; reads none of their elements."""
    parts: defaultdict[str, list[tuple[Slab, Tensor]]] = defaultdict(list)
    for dump in dumps:
        for slab, tensor in dump.tensors:
            parts[slab.name].append((slab, tensor))
    found = [DumpedTensor(name=name, parts=held) for name, held in parts.items()]
    return {tensor.name: tensor for tensor in sorted(found, key=_in_order)}


def mean_loss(dumps: Sequence[RankDump]) -> float | None:
    """Mean loss of a target token, in nats; None where no rank has recorded it."""
    losses = {slot: loss for dump in dumps for slot, loss in dump.losses.items()}
    return sum(losses.values()) / dumps[0].num_target_tokens if losses else None


def compare_tensors(ours: Mapping[str, DumpedTensor], theirs: Mapping[str, DumpedTensor]) -> Iterator[TensorComparison]:
    """Comparisons of the tensors in both dumps, in the order of computation."""
    for name, tensor in ours.items():
        if name in theirs:
            yield _compare(tensor, tensor.assemble(), theirs[name].assemble())


def _in_order(tensor: DumpedTensor) -> tuple[int, int, int]:
    section = SECTIONS.index(tensor.section)
    sign = -1 if tensor.section in ("backward", "gradients") else 1
    depth, order = tensor.position
    return (section, sign * depth, sign * order)


def _compare(tensor: DumpedTensor, ours: GlobalTensor, theirs: GlobalTensor) -> TensorComparison:
    assert ours.values.shape == theirs.values.shape, f"{tensor.name}: {ours.values.shape} and {theirs.values.shape}"
    both = ours.covered & theirs.covered
    largest, index = _largest(ours.values, theirs.values, both)
    scale = max(theirs.values.abs().where(both, 0.0).nan_to_num_(0.0).max().item(), 1e-30)
    return TensorComparison(
        name=tensor.name,
        section=tensor.section,
        largest=largest,
        relative=largest / scale,
        where=divmod(index, ours.values.shape[1]) if largest > 0 else None,
        copy_difference=max(ours.copy_difference, theirs.copy_difference) / scale,
        complete=bool(both.all()),
    )


def _largest(ours: Tensor, theirs: Tensor, where: Tensor) -> tuple[float, int]:
    """max |a - b| of the elements chosen by `where`, and its flat index.

    Equal infinities, and NaN against NaN, do not differ.
    """
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    differences = (ours - theirs).abs_().masked_fill_(same | ~where, 0.0).nan_to_num_(nan=float("inf"))
    index = int(differences.argmax())
    return differences.view(-1)[index].item(), index
