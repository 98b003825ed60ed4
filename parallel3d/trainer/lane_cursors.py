"""The cursors of all slots, as an entry's sum has them: rows of one array, each a tuple when it is asked for. Pure.

Thousands of tuples a step would cost milliseconds, and as many objects for Python's garbage collector to look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from parallel3d.data.reader import LaneCursor


class LaneCursors(Sequence[LaneCursor]):
    """`table`: (slots, integers of a cursor), not changed by anyone; equal to a tuple of the same cursors."""

    def __init__(self, table: NDArray[np.int64]):
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> LaneCursor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[LaneCursor, ...]: ...
    def __getitem__(self, index: int | slice) -> LaneCursor | tuple[LaneCursor, ...]:
        rows = self._table[index].tolist()
        return tuple(map(tuple, rows)) if isinstance(index, slice) else tuple(rows)

    def __iter__(self) -> Iterator[LaneCursor]:
        return iter(self[:])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[np.int64]:
        return np.array(self._table, dtype=dtype)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LaneCursors):
            return np.array_equal(self._table, other._table)
        return self[:] == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self[:])

    def __repr__(self) -> str:
        return repr(self[:])
