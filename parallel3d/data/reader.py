"""What feeds a sequence slot: a reader gives the tokens of any lane from any place in it.

A reader is a pure function of (lane, cursor, number of tokens): whoever holds a cursor can go on with its lane. A
cursor is a tuple of integers, as many for every lane of a run, so that it can ride in an entry and be kept in a
checkpoint by those who do not know what it means: only the reader does.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

LaneCursor = tuple[int, ...]
"""A place in a lane."""

ReadResult = tuple[np.ndarray, LaneCursor]
"""Tokens, int32 (num_tokens + 1,): inputs are [:-1], targets [1:]; and the place num_tokens on."""


class Reader(Protocol):
    """Lanes of tokens, each an endless stream."""

    def start(self, lane: int) -> LaneCursor:
        """Where the lane begins."""
        return (0, 0, 0)

    def cursor_at(self, cursor: LaneCursor, tokens_read: int) -> LaneCursor:
        """The cursor for a sequence that begins `tokens_read` tokens into the run: only a blend asks how far it is."""
        return cursor

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> ReadResult:
        """The next `num_tokens` tokens, and one more: it is read again as the next sequence's first input."""
        ...
