"""How far two checkpoints of one run are apart, tensor by tensor, whatever layouts have written them.

Read block by block of rows: the memory is that of a few blocks. Differences are |a - b| / |b| of a whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, prod, sqrt
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.checkpoint.directory import read_index
from parallel3d.checkpoint.index import KINDS, WEIGHT
from parallel3d.checkpoint.read import CheckpointReader
from parallel3d.checkpoint.tensor_chunks import IntTuple, row_blocks
from parallel3d.errors import CheckpointError

BLOCK_ELEMENTS = 4 << 20
FUSED = {"q": "qkv", "k": "qkv", "v": "qkv"}


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """Of one tensor, in one of its kinds."""

    kind: str
    tensor: str
    relative: float
    """0: equal; infinite where something is not finite."""

    @property
    def is_weight(self) -> bool:
        return self.kind == WEIGHT


@torch.no_grad()
def compare_checkpoints(ours: Path, theirs: Path, *, noise: float) -> Iterator[TensorDifference]:
    """Every tensor and kind. Elements are left out whose gradients, by the second moment, are below `noise` x those of
    their parameter: rounding decides what such a gradient is, and AdamW makes whole steps of it. 0: none are.

    Raises CheckpointError where the two hold different tensors, or a file is damaged.
    """
    mine, right = (CheckpointReader(folder, read_index(folder)) for folder in (ours, theirs))
    shapes = {name: tensor.shape for name, tensor in right.index.tensors.items()}
    if {name: tensor.shape for name, tensor in mine.index.tensors.items()} != shapes:
        raise CheckpointError(f"{ours} and {theirs} are of different models")
    floors = _floors(right, shapes, noise)
    for name, shape in shapes.items():
        floor = floors[_parameter_of(name)]
        apart, size = [0.0] * len(KINDS), [0.0] * len(KINDS)
        for start, block in row_blocks(shape, BLOCK_ELEMENTS):
            moment2 = right.read("moment2", name, start, block).double()
            counts = ~((moment2 > 0) & (moment2 < floor))  # what is not finite counts
            for number, kind in enumerate(KINDS):
                a, b = (reader.read(kind, name, start, block).double() for reader in (mine, right))
                apart[number] += _squares((a - b)[counts])
                size[number] += _squares(b)
        for number, kind in enumerate(KINDS):
            relative = sqrt(apart[number]) / max(sqrt(size[number]), 1e-30) if isfinite(apart[number]) else float("inf")
            yield TensorDifference(kind=kind, tensor=name, relative=relative)


def _floors(reader: CheckpointReader, shapes: dict[str, IntTuple], noise: float) -> dict[str, float]:
    """Of each parameter, the second moment below which an element's gradient is noise."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, shape in shapes.items():
        parameter = _parameter_of(name)
        for start, block in row_blocks(shape, BLOCK_ELEMENTS):
            total = reader.read("moment2", name, start, block).sum(dtype=torch.float64).item()
            sums[parameter] = sums.get(parameter, 0.0) + total
        counts[parameter] = counts.get(parameter, 0) + prod(shape)
    return {parameter: noise**2 * sums[parameter] / counts[parameter] for parameter in sums}


def _parameter_of(tensor: str) -> str:
    """The fused parameter that a tensor is a part of: all of a key's bias is noise, which shows beside the query's."""
    *path, module, kind = ["", *tensor.split(".")]
    return ".".join([*path, FUSED.get(module, module), kind])


def _squares(values: Tensor) -> float:
    return values.square().sum().item()
