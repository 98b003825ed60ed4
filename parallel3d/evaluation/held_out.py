"""The text that a run has held out, as rows, in groups: what its evaluations have read, the rest of it, all, or a test.

Training evaluates on the first sequences of the lanes of the held-out documents (trainer/loader.py). The rest are the
documents that none of these sequences has touched: no token of it was ever read, neither as a target nor before one.
It is packed again, in an order that depends on the run's seed alone, each group for itself. The documents of the test
are none of these: training holds them out from its evaluations, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np

from parallel3d.config.schema import Config
from parallel3d.data.corpus import Corpus
from parallel3d.data.document_index import load_split
from parallel3d.data.documents import TokenDocuments
from parallel3d.data.lanes import Cursor, Lanes, permutation
from parallel3d.data.run_data import build_evaluation_lanes, source_files
from parallel3d.errors import DataError
from parallel3d.evaluation.rows import ScoredRow, packed_rows
from parallel3d.trainer.loader import EvaluationSequences

Slice = Literal["seen", "unseen", "all", "test"]
Division = Literal["domain", "file"]
WHOLE = "held-out text"


@dataclass(frozen=True, kw_only=True)
class HeldOutText:
    """Rows, and the names of their groups."""

    names: Sequence[str]
    rows: list[ScoredRow]


class HeldOutDocuments:
    """The documents that a run evaluates on. Raises DataError if there are none."""

    def __init__(self, config: Config, corpus: Corpus):
        lanes = build_evaluation_lanes(config, corpus)
        if lanes is None:
            raise DataError("the run has no held-out text (data.validation_fraction): name files to evaluate on")
        self._lanes: Lanes = lanes
        self._config, self._corpus = config, corpus
        assert config.batch.global_batch_size is not None, "needs a resolved configuration"
        self.num_sequences = config.run.evaluate_batches * config.batch.global_batch_size
        self._length = config.batch.sequence_length

    def seen_text(self) -> HeldOutText:
        """The sequences of training's evaluations, as they were."""
        sequences = EvaluationSequences(self._lanes)
        rows = [ScoredRow(tokens=sequences.read(number, (), self._length)[0]) for number in range(self.num_sequences)]
        return HeldOutText(names=[WHOLE], rows=rows)

    @cached_property
    def seen_documents(self) -> frozenset[int]:
        """The documents of which training's evaluations have read a token."""
        return frozenset(
            document for lane in range(self._lanes.num_lanes) for document in self._seen_documents_of(lane)
        )

    def packed_text(self, part: Literal["unseen", "all"], by: Division | None, max_tokens: int | None) -> HeldOutText:
        """The unseen documents or all, packed by group, of each at most `max_tokens` targets, in whole sequences."""
        seen = self.seen_documents if part == "unseen" else frozenset()
        order = [number for number in _order(self._corpus.validation, self._config) if number not in seen]
        if not order:
            raise DataError(
                f"training's evaluations have read all {len(self._corpus.validation)} held-out documents "
                f"(run.evaluate_batches {self._config.run.evaluate_batches}): none is left. Name files, or evaluate on "
                "--slice all"
            )
        assert seen.isdisjoint(order)
        return _packed(self._config, self._corpus, "validation", order, by, max_tokens)

    def _seen_documents_of(self, lane: int) -> list[int]:
        """Those up to the one in which the lane's last sequence ends, whose first token is that sequence's target."""
        cursor = self._lanes.start(lane)
        for _ in range(lane, self.num_sequences, self._lanes.num_lanes):
            cursor = Cursor(*self._lanes.read(lane, cursor, self._length)[1])
        whole = self._lanes.document_sequence(lane, 0)
        return whole if cursor.epoch else whole[: cursor.document + 1]


def text_of_test(config: Config, corpus: Corpus, by: Division | None, max_tokens: int | None) -> HeldOutText:
    """The documents of the test, packed as HeldOutDocuments.packed_text does. Raises DataError if there are none."""
    if not len(corpus.test):
        raise DataError(
            f"the run has no test text (data.test_fraction {config.data.test_fraction:g}): set it before a run, name "
            "files, or evaluate on --slice unseen"
        )
    return _packed(config, corpus, "test", _order(corpus.test, config), by, max_tokens)


def _packed(
    config: Config,
    corpus: Corpus,
    split: Literal["validation", "test"],
    order: Sequence[int],
    by: Division | None,
    max_tokens: int | None,
) -> HeldOutText:
    """Documents of a split in an order, packed by group."""
    names, groups = _groups(config, load_split(corpus.folder)[split][:, 0], by)
    documents: TokenDocuments = getattr(corpus, split)
    rows: list[ScoredRow] = []
    for group in range(len(names)):
        mine = [number for number in order if groups[number] == group]
        rows += up_to(max_tokens, _rows(config, documents, mine, group))
    used = sorted({row.group for row in rows})
    renumbered = [ScoredRow(tokens=row.tokens, group=used.index(row.group)) for row in rows]
    return HeldOutText(names=[names[group] for group in used], rows=renumbered)


def _order(documents: TokenDocuments, config: Config) -> list[int]:
    return permutation(len(documents), config.run.seed, 0).tolist()


def _rows(config: Config, documents: TokenDocuments, numbers: Sequence[int], group: int) -> Iterator[ScoredRow]:
    end = np.array([documents.eos_id], np.int32)
    whole = (np.concatenate([documents.tokens(number), end]) for number in numbers)
    if config.data.chat is None:
        yield from packed_rows(whole, length=config.batch.sequence_length, group=group)
    else:  # a conversation begins and ends in its row
        for document in whole:
            yield ScoredRow(tokens=document[: config.batch.sequence_length + 1], group=group)


def _groups(config: Config, file_of: np.ndarray, by: Division | None) -> tuple[list[str], np.ndarray]:
    """Names of the groups, and the group of each document; `file_of`: the number of its file."""
    if by is None:
        return [WHOLE], np.zeros_like(file_of)
    files = source_files(config.data)
    if by == "file":
        return _short_names([file for paths in files.values() for file in paths]), file_of
    last_files = [*accumulate(len(paths) for paths in files.values())]
    return list(files), np.searchsorted(last_files, file_of, side="right")


def up_to(max_tokens: int | None, rows: Iterator[ScoredRow]) -> Iterator[ScoredRow]:
    """The first rows, as long as their targets are at most `max_tokens`; the first one in any case."""
    num_tokens = 0
    for row in rows:
        num_tokens += row.num_targets
        if max_tokens is not None and num_tokens > max_tokens and num_tokens > row.num_targets:
            return
        yield row


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Names of files; with their folders where two are equal."""
    names = [path.name for path in paths]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths)]
