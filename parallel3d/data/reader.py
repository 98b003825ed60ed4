"""The interface of a reader, which feeds sequence slots: it returns the tokens of any lane from any cursor on.

A reader is a pure function of (lane, cursor, number of tokens), so any rank that holds a cursor can continue its lane.
A cursor is a tuple of integers, of the same length for every lane of a run. Entries and checkpoints carry it without
interpreting it; only the reader knows its meaning.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

LaneCursor = tuple[int, ...]
"""A position in a lane."""

ReadResult = tuple[np.ndarray, LaneCursor]
"""Tokens, int32 (num_tokens + 1,): inputs are [:-1], targets [1:]; and the cursor num_tokens further on. A negative
number ~id stands for a token that is not a target (marked_text.py)."""


class Reader(Protocol):
    """Lanes of tokens, each an endless stream."""

    def start(self, lane: int) -> LaneCursor:
        """The cursor of the lane's start."""
        return (0, 0, 0)

    def cursor_at(self, cursor: LaneCursor, tokens_read: int) -> LaneCursor:
        """The cursor for a sequence that starts `tokens_read` tokens into the run, which only a data mixture uses."""
        return cursor

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> ReadResult:
        """The next `num_tokens` tokens, and one more: it is read again as the next sequence's first input."""
        ...
