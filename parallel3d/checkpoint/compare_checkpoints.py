"""The differences between two checkpoints, tensor by tensor, whatever layouts wrote them.

They are read by blocks of rows and take the memory of a few blocks. A difference is |a - b| / |b| of a whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, prod, sqrt
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.checkpoint.directory import read_index
from parallel3d.checkpoint.index import WEIGHT
from parallel3d.checkpoint.read import CheckpointReader
from parallel3d.checkpoint.tensor_chunks import row_blocks
from parallel3d.errors import CheckpointError
from parallel3d.optim.update_rules.update_rule import EXP_AVG_SQ

BLOCK_ELEMENTS = 4 << 20
FUSED = {"q": "qkv", "k": "qkv", "v": "qkv"}


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """The difference of one tensor, in one of its kinds."""

    kind: str
    tensor: str
    relative: float
    """0: equal; infinite if an element is not finite."""

    @property
    def is_weight(self) -> bool:
        return self.kind == WEIGHT


@torch.no_grad()
def compare_checkpoints(ours: Path, theirs: Path, *, noise: float) -> Iterator[TensorDifference]:
    """Yields the difference of every tensor in each of its kinds.

    Leaves out elements whose gradients, by the second moment, are below `noise` times those of their parameter: such a
    gradient is rounding noise, of which AdamW makes whole steps. With 0, or without second moments, all elements count.
    Raises CheckpointError if the two hold different tensors or a file is damaged.
    """
    mine, right = (CheckpointReader(folder, read_index(folder)) for folder in (ours, theirs))
    tensors = {name: (tensor.shape, tensor.kinds.keys()) for name, tensor in right.index.tensors.items()}
    if {name: (tensor.shape, tensor.kinds.keys()) for name, tensor in mine.index.tensors.items()} != tensors:
        raise CheckpointError(f"{ours} and {theirs} are of different models or update rules")
    floors = _floors(right, noise)
    for name, (shape, kinds) in tensors.items():
        floor = floors.get(_parameter_of(name))
        apart, size = dict.fromkeys(kinds, 0.0), dict.fromkeys(kinds, 0.0)
        for start, block in row_blocks(shape, BLOCK_ELEMENTS):
            counts = torch.ones(block, dtype=torch.bool)
            if floor is not None:
                exp_avg_sq = right.read(EXP_AVG_SQ.kind, name, start, block).double()
                counts = ~((exp_avg_sq > 0) & (exp_avg_sq < floor))  # elements that are not finite count
            for kind in kinds:
                a, b = (reader.read(kind, name, start, block).double() for reader in (mine, right))
                apart[kind] += _squares((a - b)[counts])
                size[kind] += _squares(b)
        for kind in kinds:
            relative = sqrt(apart[kind]) / max(sqrt(size[kind]), 1e-30) if isfinite(apart[kind]) else float("inf")
            yield TensorDifference(kind=kind, tensor=name, relative=relative)


def _floors(reader: CheckpointReader, noise: float) -> dict[str, float]:
    """For each parameter with second moments: the second moment below which an element's gradient is noise."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, tensor in reader.index.tensors.items():
        if EXP_AVG_SQ.kind not in tensor.kinds:
            continue
        parameter = _parameter_of(name)
        for start, block in row_blocks(tensor.shape, BLOCK_ELEMENTS):
            total = reader.read(EXP_AVG_SQ.kind, name, start, block).sum(dtype=torch.float64).item()
            sums[parameter] = sums.get(parameter, 0.0) + total
        counts[parameter] = counts.get(parameter, 0) + prod(tensor.shape)
    return {parameter: noise**2 * sums[parameter] / counts[parameter] for parameter in sums}


def _parameter_of(tensor: str) -> str:
    """The fused parameter of a tensor. A key's bias, for example, is nothing but noise, as the query's bias shows."""
    *path, module, kind = ["", *tensor.split(".")]
    return ".".join([*path, FUSED.get(module, module), kind])


def _squares(values: Tensor) -> float:
    return values.square().sum().item()
