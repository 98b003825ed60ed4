"""Lanes: one endless stream of tokens for each sequence slot, a pure function of (seed, lane, cursor).

    documents of epoch e        perm(seed, e) = [ 7  2  9  0  5  1  8 ... ]
    dealt to 3 lanes            lane 0: 7 0 8 ...   lane 1: 2 5 ...   lane 2: 9 1 ...
    packed                      lane 0: [tokens of 7] EOS [tokens of 0] EOS [tokens of 8] EOS ... then data epoch e + 1
    cut exactly                         |--- n + 1 tokens ---|
                                                            |--- n + 1 tokens ---|   next read, from its cursor

Ranks, data-parallel size and micro-batch size appear nowhere, so that any rank can take over any lane at once. What is
left of a document opens the lane's next sequence (packing as in GPT-3): no token is lost or repeated.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parallel3d.data.documents import TokenDocuments
from parallel3d.data.reader import LaneCursor, Reader
from parallel3d.errors import DataError


class Cursor(NamedTuple):
    """Position in a lane of one source: the next token to read."""

    epoch: int
    """Completed passes over the data."""
    document: int
    """Position in the lane's document sequence of this epoch."""
    offset: int
    """Tokens of that document that have been read; its EOS is the last one."""

    @staticmethod
    def start() -> Cursor:
        return Cursor(0, 0, 0)


class Lanes(Reader):
    """The lanes of one set of documents. Reading is thread-safe; each lane remembers its last tokenised document."""

    def __init__(self, documents: TokenDocuments, seed: int, num_lanes: int):
        if len(documents) < num_lanes:
            raise DataError(
                f"{len(documents)} documents can't feed {num_lanes} sequences a step: give more text, lower "
                "data.document_chars so that it is cut into more documents, or use fewer sequences a step"
            )
        self.num_lanes = num_lanes
        self._documents = documents
        # Lanes pass from one data epoch to the next at different times: two permutations are in use.
        self._permutation = lru_cache(maxsize=2)(lambda epoch: permutation(len(documents), seed, epoch))
        self._last: dict[int, tuple[Cursor, np.ndarray]] = {}

    def start(self, lane: int) -> Cursor:
        return Cursor.start()

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> tuple[np.ndarray, Cursor]:
        """Returns token ids, int32 (num_tokens + 1,), inputs [:-1] and targets [1:], and the cursor num_tokens on.

        The last token is read again as the first input of the next sequence: each token is a target exactly once,
        except for the lane's first.
        """
        parts: list[np.ndarray] = []
        position, missing = Cursor(*cursor), num_tokens
        while missing:
            part, position = self._advance(lane, position, missing)
            parts.append(part)
            missing -= len(part)
        parts.append(self._advance(lane, position, 1)[0])
        return np.concatenate(parts), position

    def document_sequence(self, lane: int, epoch: int) -> list[int]:
        """Returns the documents that feed `lane` in epoch `epoch`, in order."""
        return self._sequence(lane, epoch).tolist()

    def _sequence(self, lane: int, epoch: int) -> np.ndarray:
        if not 0 <= lane < self.num_lanes:
            raise IndexError(f"lane {lane} of {self.num_lanes}")
        return self._permutation(epoch)[lane :: self.num_lanes]

    def _advance(self, lane: int, cursor: Cursor, at_most: int) -> tuple[np.ndarray, Cursor]:
        """Returns 1 to `at_most` tokens of the cursor's document, and the cursor after them."""
        sequence = self._sequence(lane, cursor.epoch)
        tokens = self._tokens(lane, Cursor(cursor.epoch, cursor.document, 0), sequence)
        if cursor.offset >= len(tokens):
            raise DataError(f"lane {lane}: {cursor} lies outside its document: the corpus or the tokenizer has changed")
        part = tokens[cursor.offset : cursor.offset + at_most]
        offset = cursor.offset + len(part)
        if offset < len(tokens):
            return part, Cursor(cursor.epoch, cursor.document, offset)
        if cursor.document + 1 < len(sequence):
            return part, Cursor(cursor.epoch, cursor.document + 1, 0)
        return part, Cursor(cursor.epoch + 1, 0, 0)

    def _tokens(self, lane: int, opening: Cursor, sequence: np.ndarray) -> np.ndarray:
        """Returns the tokens and the EOS of the document that begins at `opening`."""
        last = self._last.get(lane)
        if last is not None and last[0] == opening:
            return last[1]
        if opening.document >= len(sequence):
            raise DataError(
                f"lane {lane}: {opening} lies outside its {len(sequence)} documents: the corpus has changed"
            )
        document = self._documents.tokens(int(sequence[opening.document]))
        tokens = np.append(document, np.int32(self._documents.eos_id))
        self._last[lane] = (opening, tokens)
        return tokens


def permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    """Returns a permutation of range(length), int64: the order of hashes of (seed, epoch, index).

    Our own hash (splitmix64: Steele, Lea and Flood 2014), since numpy may change its generators' streams.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)
    salt = _splitmix64(_splitmix64(key[:1]) ^ key[1:])
    return np.argsort(_splitmix64(np.arange(length, dtype=np.uint64) ^ salt), kind="stable")


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """Mixes uint64 values, one to one."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
