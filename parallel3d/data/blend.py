"""Lanes over several weighted sources: each sequence comes from one source, and weights are shares of the tokens.

    lane 3, sequences     0     1     2     3     4     5   ...
    its number u(3, k)   .75   .37   .99   .60   .22   .84        between 0 and 1
    weights web .7 code .3
    its source           code  web   code  web   web   code
    read from            |------ its own lane 3 of "web", and of "code", each with a cursor of its own -----|

u(lane, k) = seed's number + lane with its bits reversed + k x golden ratio, modulo 1. It is not random: it spreads
evenly over a lane's sequences (Weyl 1916) and over a step's lanes, also over any first n of them (van der Corput 1935).
So every step comes as near to the weights as its number of sequences allows, and a lane is off by a few sequences at
any length, where random draws would be off by a square root.

A small source, or one with a large weight, repeats its data epochs as often as needed. Weights change from one stage to
the next at a token of the run, exact to a sequence; the cursors in the sources continue.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from parallel3d.data.documents import TokenDocuments
from parallel3d.data.lanes import Lanes
from parallel3d.data.reader import LaneCursor, Reader, ReadResult

GOLDEN_RATIO = 0x9E3779B97F4A7C15
"""As a fraction of 2**64."""
RESOLUTION_LOG2 = 53
"""Weights are normalised in double precision."""


@dataclass(frozen=True, kw_only=True)
class BlendStage:
    """Weights that apply from one token of the run on."""

    from_token: int
    weights: tuple[float, ...]
    """One per source; their sum is any positive number."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """Upper end of each source's part of 0 .. 2**64."""
        sums = list(accumulate(self.weights))
        return tuple(round(upto / sums[-1] * 2**RESOLUTION_LOG2) << (64 - RESOLUTION_LOG2) for upto in sums)


@dataclass(frozen=True)
class Subset:
    """A subset of documents, in the given order."""

    documents: TokenDocuments
    indices: np.ndarray

    @property
    def eos_id(self) -> int:
        return self.documents.eos_id

    def __len__(self) -> int:
        return len(self.indices)

    def tokens(self, index: int) -> np.ndarray:
        return self.documents.tokens(int(self.indices[index]))


def seed_offset(seed: int) -> int:
    """Offset, derived from the seed, of the numbers of all sequences."""
    return int.from_bytes(hashlib.blake2b(f"blend {seed}".encode(), digest_size=8).digest(), "little")


def low_discrepancy_number(offset: int, lane: int, sequence: int) -> int:
    """The number below 2**64 that chooses the source of a lane's sequence."""
    reversed_bits = int(f"{lane:064b}"[::-1], 2)
    return (offset + reversed_bits + sequence * GOLDEN_RATIO) % 2**64


def choose_source(bounds: Sequence[int], number: int) -> int:
    """The source whose part contains `number`; a source of weight 0 has no part."""
    return bisect_right(bounds, number)


class BlendedReader(Reader):
    """Reads each sequence of a lane from one of several sources.

    A cursor is (stage, sequences read, then epoch, document and offset in each source): 2 + 3 x sources integers.
    """

    def __init__(self, sources: Sequence[Lanes], stages: Sequence[BlendStage], seed: int):
        """`stages` in the order of their tokens, the first from token 0."""
        assert stages[0].from_token == 0, "the first stage is from the run's start"
        self._sources = tuple(sources)
        self._starts = [stage.from_token for stage in stages]
        self._bounds = [stage.bounds for stage in stages]
        self._offset = seed_offset(seed)

    def start(self, lane: int) -> LaneCursor:
        return (0, 0, *(number for source in self._sources for number in source.start(lane)))

    def cursor_at(self, cursor: LaneCursor, tokens_read: int) -> LaneCursor:
        return (bisect_right(self._starts, tokens_read) - 1, *cursor[1:])

    def source_of(self, lane: int, cursor: LaneCursor) -> int:
        """The number of the source that the next sequence is read from."""
        stage, num_sequences, *_ = cursor
        return choose_source(self._bounds[stage], low_discrepancy_number(self._offset, lane, num_sequences))

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> ReadResult:
        stage, num_sequences, *source_cursors = cursor
        source = self.source_of(lane, cursor)
        mine = slice(3 * source, 3 * source + 3)
        tokens, source_cursors[mine] = self._sources[source].read(lane, tuple(source_cursors[mine]), num_tokens)
        return tokens, (stage, num_sequences + 1, *source_cursors)
