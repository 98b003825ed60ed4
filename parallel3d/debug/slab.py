"""Describes which part of a global tensor a rank holds, so that dumps of any layout can be assembled.

Every dumped tensor is a matrix: activations are (sequence slot x position, feature), parameters (out, in) or (elements,
1). A rank holds some runs of its rows and columns; for a parameter, a range of its flattened part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from parallel3d.parallel.sharding import IndexRun, ParamSharding


@dataclass(frozen=True, kw_only=True)
class Slab:
    """A part of the global matrix `name` of `shape`: a tensor of `local_shape`, or some of its elements."""

    name: str
    shape: tuple[int, int]
    local_shape: tuple[int, int]
    rows: tuple[IndexRun, ...]
    columns: tuple[IndexRun, ...]
    flat_start: int | None = None
    """The tensor is (elements,): those of the flattened part from here on. None: the whole part."""
    is_partial_sum: bool = False
    """Elements on several ranks are terms of a sum: each rank has the gradient of its own use."""
    depth: int = 0
    """Number of its layer; -1 before the first."""
    order: int = 0
    """Order of first appearance in the rank's forward pass, within a depth; negative for parameters."""

    def index(self, num_elements: int) -> Tensor:
        """Index in the flattened global matrix of each of `num_elements` local elements, int64; -1 for padding."""
        rows, columns = (
            _global_indices(self.rows, self.local_shape[0]),
            _global_indices(self.columns, self.local_shape[1]),
        )
        start = self.flat_start or 0
        local = torch.arange(start, start + num_elements)
        row, column = rows[local // self.local_shape[1]], columns[local % self.local_shape[1]]
        return torch.where((row < 0) | (column < 0), -1, row * self.shape[1] + column)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Slab:
        runs = {name: tuple(IndexRun(**run) for run in data[name]) for name in ("rows", "columns")}
        sizes = {name: (data[name][0], data[name][1]) for name in ("shape", "local_shape")}
        return Slab(**{**data, **runs, **sizes})


def parameter_slab(
    sharding: ParamSharding, *, suffix: str, tp_rank: int, tp_size: int, flat_start: int, depth: int, order: int
) -> Slab:
    """The slab of a range of a parameter's local share, or of its gradient, named with `suffix`."""
    shape, local = sharding.shape, sharding.local_shape(tp_size)
    assert len(shape) <= 2, f"{sharding.name} has {len(shape)} dimensions"
    sizes = [_matrix(shape), _matrix(local)]
    runs = sharding.runs(tp_rank, tp_size)
    return Slab(
        name=sharding.name + suffix,
        shape=sizes[0],
        local_shape=sizes[1],
        rows=runs if sharding.dim == 0 else full_dimension(shape[0]),
        columns=runs if sharding.dim == 1 else full_dimension(sizes[0][1]),
        flat_start=flat_start,
        depth=depth,
        order=order,
    )


def full_dimension(size: int) -> tuple[IndexRun, ...]:
    """One run that covers a whole dimension."""
    return (IndexRun(global_start=0, local_start=0, length=size),)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[0], shape[1] if len(shape) > 1 else 1)


def _global_indices(runs: Sequence[IndexRun], size: int) -> Tensor:
    """Global index of each of `size` local indices; -1 for padding."""
    indices = torch.full((size,), -1, dtype=torch.int64)
    for run in runs:
        stop = run.local_start + run.length
        indices[run.local_start : stop] = torch.arange(run.global_start, run.global_start + run.length)
    return indices
