"""Rows: the sequences on which a model is scored, and how they are put together.

A row is a sequence of tokens of which some are targets. A token that is only read is stored as ~id, as in the corpora
(data/marked_text.py)::

    a text with windows of 4 inputs and a stride of 2, P being the token in front of it

    ~P  a   b   c   d                      scores a b c d
           ~b  ~c  ~d   e   f              scores e f: 4 inputs b c d e
                   ~d  ~e  ~f   g   h      scores g h
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

MAX_LOGITS = 2**26
"""Logits of one batch, which exist at the same time: 256 MiB in fp32. A single row may have more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredRow:
    """A sequence of a group of texts."""

    tokens: np.ndarray
    """int32 (length + 1,): the inputs are all but the last, the targets all but the first; ~id: not a target."""
    group: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens) - 1

    @property
    def num_targets(self) -> int:
        return int((self.tokens[1:] >= 0).sum())


@dataclass(frozen=True, kw_only=True)
class RowScore:
    """How well a model predicts the targets of a row."""

    log_prob: float
    """Sum over the targets, in nats."""
    num_targets: int
    is_greedy: bool
    """Whether each target is the likeliest token."""


def make_batches(rows: Sequence[ScoredRow], *, batch_size: int, vocab_size: int) -> list[list[int]]:
    """Numbers of the rows that are computed together: of similar lengths, since shorter ones are filled up."""
    batches: list[list[int]] = []
    for number in sorted(range(len(rows)), key=lambda number: -rows[number].length):
        if batches:
            length, size = rows[batches[-1][0]].length, len(batches[-1])
            if size < batch_size and (size + 1) * length * vocab_size <= MAX_LOGITS:
                batches[-1].append(number)
                continue
        batches.append([number])
    return batches


def fill_up(rows: Sequence[ScoredRow]) -> np.ndarray:
    """Stored tokens int32 (rows, longest): tokens that are not targets, and that no target sees, fill shorter rows."""
    longest = max(len(row.tokens) for row in rows)
    stored = np.full((len(rows), longest), ~0, np.int32)
    for number, row in enumerate(rows):
        stored[number, : len(row.tokens)] = row.tokens
    return stored


def sliding_rows(tokens: np.ndarray, *, first: int, window: int, stride: int, group: int) -> Iterator[ScoredRow]:
    """Rows that score each token of a text once: `window` inputs at most, of which the last `stride` predict what no
    row before has scored. `first` is the token in front of the text."""
    whole = np.concatenate([[~first], tokens]).astype(np.int32)
    scored = 0
    while scored < len(tokens):
        end = min(len(tokens), scored + (window if scored == 0 else stride))
        begin = max(0, end - window)
        part = whole[begin : end + 1].copy()
        seen = scored + 1 - begin  # tokens of the row that are not scored, or were
        part[:seen] = np.minimum(part[:seen], ~part[:seen])
        yield ScoredRow(tokens=part, group=group)
        scored = end


def continuation_row(context: Sequence[int], continuation: Sequence[int], *, group: int = 0) -> ScoredRow:
    """A row whose targets are the tokens of the continuation."""
    both = [*(~int(token) for token in context), *map(int, continuation)]
    return ScoredRow(tokens=np.array(both, np.int32), group=group)


def packed_rows(documents: Iterable[np.ndarray], *, length: int, group: int) -> Iterator[ScoredRow]:
    """Rows of `length` targets, cut from the documents one after the other; the last one is shorter.

    Each token is a target once, except for the first of all. The last token of a row is the first input of the next.
    """
    rest = np.zeros(0, np.int32)
    for document in documents:
        rest = np.concatenate([rest, document.astype(np.int32)])
        while len(rest) > length:
            yield ScoredRow(tokens=rest[: length + 1].copy(), group=group)
            rest = rest[length:]
    if len(rest) > 1:
        yield ScoredRow(tokens=rest, group=group)
