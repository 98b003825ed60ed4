"""The table by which the kernel of the update finds the key and the global index of each element of a range.

A `Piece` is a run of a range's elements whose global indices follow one rule, with e = element - origin::

    index(element) = (e // width) * stride + e % width + shift

A parameter that is whole, or cut along dimension 0, has one piece for each of its fused blocks, of one row; one that is
cut along a later dimension has one piece of many rows. Programs own blocks of a piece: one searches the table for its
row, by `first_program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel3d.parallel.staged_group import to_device
from parallel3d.random_keys import Key

BLOCK = 1024
"""Elements of a program. Any power of two gives the same updates; tests interpret fewer, larger ones."""
ALIGNMENT = 16
"""Elements: blocks begin at multiples of it, so that vectors of 128 bits are read and written."""
COLUMNS = 10
_NO_PROGRAM = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements `start` to `stop` of a range."""

    start: int
    stop: int
    origin: int
    """The element at which the parameter's local share begins; negative if that is before the range."""
    width: int
    stride: int
    shift: int
    name: str
    """The parameter's."""
    is_counted: bool = True
    """Whether this rank counts the elements in norms."""

    @property
    def first_block(self) -> int:
        return self.start // ALIGNMENT * ALIGNMENT

    def num_programs(self, block: int) -> int:
        return -(-(self.stop - self.first_block) // block)


@dataclass(frozen=True, kw_only=True)
class UpdateTable:
    """The pieces of a range with the keys of one update, on the device."""

    rows: Tensor
    """(a power of two, COLUMNS) int64; rows that only fill up have no programs."""
    num_pieces: int
    num_programs: int
    block: int
    """Elements of a program."""
    is_aligned: bool
    """Whether all pieces begin and end at multiples of ALIGNMENT."""
    has_rows: bool
    """Whether some piece has more than one row."""

    @staticmethod
    def build(pieces: Sequence[Piece], keys: Sequence[Key], block: int = BLOCK) -> UpdateTable:
        """The table of `pieces`, which are in order, in host memory."""
        rows, first_program = list[tuple[int, ...]](), 0
        for piece, key in zip(pieces, keys):
            rule = (piece.origin, piece.width, piece.stride, piece.shift)
            rows.append((first_program, piece.start, piece.stop, *rule, piece.is_counted, key.first, key.second))
            first_program += piece.num_programs(block)
        num_rows = 1 << max(0, len(rows) - 1).bit_length()
        rows += [(_NO_PROGRAM, *[0] * (COLUMNS - 1))] * (num_rows - len(rows))
        return UpdateTable(
            rows=torch.tensor(rows, dtype=torch.int64),
            num_pieces=len(pieces),
            num_programs=first_program,
            block=block,
            is_aligned=all(piece.start % ALIGNMENT == piece.stop % ALIGNMENT == 0 for piece in pieces),
            has_rows=any(piece.stop - piece.origin > piece.width for piece in pieces),
        )

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's, of which each combination is compiled once."""
        return dict(NUM_ROWS=len(self.rows), IS_ALIGNED=self.is_aligned, HAS_ROWS=self.has_rows, BLOCK=self.block)

    def to(self, device: torch.device) -> UpdateTable:
        """The table on `device`, which the host does not wait for."""
        return replace(self, rows=to_device(self.rows, device))
