"""A slice of one file of tokens, read in whole global batches and in the file's order.

    file     |------|b0 b0 b0 b0|b1 b1 b1 b1|b2 b2 b2 b2|t|-----     4 sequences a batch; t: the last one's last target
             0      start                                stop        where a following run starts

Sequence n = step x global batch + slot has the tokens from start + n x length on, so that what a step reads does not
depend on any layout. After its end a slice is read again from its start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from parallel3d.data.reader import LaneCursor, Reader, ReadResult
from parallel3d.errors import DataError

ALL = -1


class TokenArray(Protocol):
    """Tokens in a row, such as a file of them."""

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` ids from number `start` on, int32 (count,)."""
        ...


@dataclass(frozen=True, kw_only=True)
class TokenSlice:
    """A part of a file of tokens, in whole global batches."""

    start: int
    """First token."""
    num_batches: int
    global_batch_size: int
    sequence_length: int

    @property
    def num_sequences(self) -> int:
        return self.num_batches * self.global_batch_size

    @property
    def num_tokens(self) -> int:
        """Inputs; one more token is read, as the target of the last."""
        return self.num_sequences * self.sequence_length

    @property
    def stop(self) -> int:
        """The token at which a following run starts: no token is skipped, none is read twice."""
        return self.start + self.num_tokens

    def first_token_of(self, sequence: int) -> int:
        """First token of a sequence, counted from 0 on over all passes."""
        return self.start + sequence % self.num_sequences * self.sequence_length


def plan_slice(
    num_tokens: int, *, start_token: int, min_tokens: int, global_batch_size: int, sequence_length: int
) -> TokenSlice:
    """The slice of a file of `num_tokens` from `start_token` on, of at least `min_tokens` (ALL: as many as fit).

    Raises DataError where the file is too short.
    """
    batch_tokens = global_batch_size * sequence_length
    available = max(0, num_tokens - start_token - 1)  # the last input needs a target
    most = available // batch_tokens
    wanted = most if min_tokens == ALL else -(-min_tokens // batch_tokens)
    if start_token >= num_tokens:
        raise DataError(f"data.slice.start_token {start_token:,}: the file has {num_tokens:,} tokens")
    if most < max(1, wanted):
        raise DataError(
            f"data.slice: from token {start_token:,} on the file has {available:,} tokens with a target, room for"
            f" {most:,} global batches of {global_batch_size} x {sequence_length} = {batch_tokens:,}, and"
            f" {max(1, wanted):,} are asked for. Start earlier, lower data.slice.min_tokens, or use smaller batches"
        )
    return TokenSlice(
        start=start_token, num_batches=wanted, global_batch_size=global_batch_size, sequence_length=sequence_length
    )


class TokenSliceReader(Reader):
    """Reads a slice; a cursor is the number of the lane's next sequence."""

    def __init__(self, tokens: TokenArray, part: TokenSlice):
        self._tokens = tokens
        self._part = part

    def start(self, lane: int) -> LaneCursor:
        return (lane,)

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> ReadResult:
        if num_tokens != self._part.sequence_length:
            raise DataError(
                f"data.slice is read in sequences of batch.sequence_length = {self._part.sequence_length} tokens,"
                f" not of {num_tokens}: leave data.slice out for lengths that change"
            )
        (sequence,) = cursor
        first_token = self._part.first_token_of(sequence)
        return self._tokens.read(first_token, num_tokens + 1), (sequence + self._part.global_batch_size,)
