"""Describes which part of a global tensor a rank holds, so that dumps of any layout can be assembled.

Every dumped tensor is a matrix: activations are (sequence slot x position, feature), parameters (out, in) or (elements,
1). A rank holds some runs of its rows and columns; for a parameter, a range of its flattened part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from parallel3d.parallel.sharding import IndexRun, ParamSharding, TpShard

Block = tuple[slice, slice]
"""Rows and columns of a matrix."""


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

    def blocks(self, tensor: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """The rectangles of the global matrix that `tensor` holds, each with its part of it; padding is left out.

        A range of the flattened part is at most three rectangles: the end of a row, whole rows, the start of a row.
        """
        flat, width, start = tensor.reshape(-1), self.local_shape[1], self.flat_start or 0
        stop = start + flat.numel()
        for first, last in _row_aligned(start, stop, width):
            row, column = divmod(first, width)
            num_rows, num_columns = max(1, (last - first) // width), min(width, last - first)
            values = flat[first - start : last - start].view(num_rows, num_columns)
            for rows, its_rows in _overlaps(self.rows, row, num_rows):
                for columns, its_columns in _overlaps(self.columns, column, num_columns):
                    yield (rows, columns), values[its_rows, its_columns]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Slab:
        runs = {name: tuple(IndexRun(**run) for run in data[name]) for name in ("rows", "columns")}
        sizes = {name: (data[name][0], data[name][1]) for name in ("shape", "local_shape")}
        return Slab(**{**data, **runs, **sizes})


def parameter_slab(
    sharding: ParamSharding, *, suffix: str, tp: TpShard, flat_start: int, depth: int, order: int
) -> Slab:
    """The slab of a range of a parameter's local share, or of its gradient, named with `suffix`."""
    shape, local = sharding.shape, sharding.local_shape(tp.size)
    assert len(shape) <= 2, f"{sharding.name} has {len(shape)} dimensions"
    sizes = [_matrix(shape), _matrix(local)]
    runs = sharding.runs(tp)
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


def _row_aligned(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Cuts a range of flat indices into ranges of whole rows and of parts of one row; leaves empty ones out."""
    first_whole = min(stop, -(-start // width) * width)
    last_whole = max(first_whole, stop // width * width)
    bounds = (start, first_whole, last_whole, stop)
    return ((first, last) for first, last in pairwise(bounds) if first < last)


def _overlaps(runs: Sequence[IndexRun], first: int, length: int) -> Iterator[tuple[slice, slice]]:
    """The local indices first to first + length - 1 that runs hold: global slices, each with the slice from `first`."""
    for run in runs:
        begin = max(first, run.local_start)
        end = min(first + length, run.local_start + run.length)
        if begin < end:
            shift = run.global_start - run.local_start
            yield slice(begin + shift, end + shift), slice(begin - first, end - first)
