"""Where a rank's part of a tensor stands in the whole, so that dumps of different layouts can be put together.

Whatever is dumped is a matrix: activations are (sequence slot x position, feature), parameters (out, in) or (elements,
1). A rank has some runs of its rows and of its columns, or, of a parameter's gradient whose range it owns, a stretch of
its flattened part.
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
    """A part of the global matrix `name` of `shape`: a tensor of `local_shape`, or elements of such a one."""

    name: str
    shape: tuple[int, int]
    local_shape: tuple[int, int]
    rows: tuple[IndexRun, ...]
    columns: tuple[IndexRun, ...]
    flat_start: int | None = None
    """The tensor is (elements,): those of the flattened part from here on. None: it is the whole part."""
    is_partial_sum: bool = False
    """Elements that several ranks hold are parts of a sum: gradients of what each has used for itself alone."""
    depth: int = 0
    """Which layer it belongs to; -1 before the first."""
    order: int = 0
    """When it was first seen in its rank's forward pass; only comparable within a depth. Negative: a parameter's."""

    def index(self, num_elements: int) -> Tensor:
        """For each of the `num_elements` elements held: its place in the flattened whole, -1 for padding; int64."""
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
    """A stretch of a parameter's local share, or of its gradient's, under the parameter's name and `suffix`."""
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
    """All of a dimension."""
    return (IndexRun(global_start=0, local_start=0, length=size),)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[0], shape[1] if len(shape) > 1 else 1)


def _global_indices(runs: Sequence[IndexRun], size: int) -> Tensor:
    """The global index of each of `size` local ones, -1 for padding."""
    indices = torch.full((size,), -1, dtype=torch.int64)
    for run in runs:
        stop = run.local_start + run.length
        indices[run.local_start : stop] = torch.arange(run.global_start, run.global_start + run.length)
    return indices
