"""Which of the held-out documents are read: none twice, none that training's evaluations have read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parallel3d.data.document_index import load_split
from parallel3d.data.marked_text import split_targets
from parallel3d.data.run_data import build_evaluation_lanes, open_run_corpus
from parallel3d.errors import DataError
from parallel3d.evaluation.held_out import HeldOutDocuments, text_of_test
from parallel3d.parallel.abort import AbortToken
from parallel3d.trainer.loader import EvaluationSequences


class Watched:
    """Documents that remember which of them were read."""

    def __init__(self, documents):
        self.documents, self.eos_id, self.read = documents, documents.eos_id, set()

    def __len__(self):
        return len(self.documents)

    def tokens(self, index):
        self.read.add(index)
        return self.documents.tokens(index)


def with_batches(saved_run, num_batches):
    run = saved_run.config.run.model_copy(update={"evaluate_batches": num_batches})
    return saved_run.config.model_copy(update={"run": run})


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_the_unseen_slice_has_no_document_that_evaluations_have_read(saved_run, num_batches):
    config = with_batches(saved_run, num_batches)
    watched = Watched(saved_run.corpus.validation)
    corpus = replace(saved_run.corpus, validation=watched)
    sequences = EvaluationSequences(build_evaluation_lanes(config, corpus))
    num_sequences = num_batches * config.batch.global_batch_size
    rows = [sequences.read(number, (), config.batch.sequence_length)[0] for number in range(num_sequences)]
    read_by_evaluations, watched.read = watched.read, set()

    held_out = HeldOutDocuments(config, corpus)
    assert np.array_equal(np.stack([row.tokens for row in held_out.seen_text().rows]), np.stack(rows))
    assert held_out.seen_documents == read_by_evaluations
    watched.read = set()
    text = held_out.packed_text("unseen", "file", None)
    assert watched.read == set(range(len(watched))) - read_by_evaluations and watched.read and text.rows


def test_all_documents_are_read_once(saved_run):
    """Every token of every document is a target once, but the first of all."""
    rows = HeldOutDocuments(saved_run.config, saved_run.corpus).packed_text("all", None, None).rows
    targets = np.concatenate([split_targets(row.tokens[None])[1][0] for row in rows])
    documents = saved_run.corpus.validation
    whole = np.concatenate([documents.tokens(number) for number in range(len(documents))])
    counts = np.bincount(targets, minlength=257)
    expected = np.bincount(whole, minlength=257)
    expected[documents.eos_id] = len(documents)
    expected[rows[0].tokens[0]] -= 1
    assert np.array_equal(counts, expected)


def test_the_test_is_read_by_neither_training_nor_its_evaluations(saved_run):
    data = saved_run.config.data.model_copy(update={"test_fraction": 0.2})
    config = saved_run.config.model_copy(update={"data": data})
    corpus = open_run_corpus(config, AbortToken(), lambda text: None)
    watched = replace(corpus, test=Watched(corpus.test))
    rows = text_of_test(config, watched, "file", None)
    assert watched.test.read == set(range(len(corpus.test))) and len(corpus.test) > 1 and rows.rows
    places = {name: {tuple(row) for row in rows.tolist()} for name, rows in load_split(corpus.folder).items()}
    assert len(places["test"]) == len(corpus.test) and len(places["validation"]) == len(corpus.validation)
    assert not places["test"] & (places["train"] | places["validation"])


def test_a_run_without_a_test(saved_run):
    with pytest.raises(DataError, match=r"has no test text .data\.test_fraction 0.: set it before a run, name files"):
        text_of_test(saved_run.config, saved_run.corpus, None, None)


def test_nothing_is_left(saved_run):
    with pytest.raises(DataError, match="have read all .* held-out documents .run.evaluate_batches 500."):
        HeldOutDocuments(with_batches(saved_run, 500), saved_run.corpus).packed_text("unseen", None, None)
