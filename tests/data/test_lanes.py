"""Lanes are pure functions of (seed, lane, cursor), and together they are the corpus."""

import itertools
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.data.documents import TokenizedDocuments
from parallel3d.data.lanes import Cursor, Lanes, _splitmix64, permutation
from parallel3d.errors import DataError
from tests.support.letter_corpus import Characters, Texts, corpora, flat, seeds


@st.composite
def lanes_of_corpora(draw):
    documents = draw(corpora)
    return Lanes(
        TokenizedDocuments(documents, Characters()), draw(seeds), draw(st.integers(1, len(documents)))
    ), documents


def walk(lanes, lane, lengths, cursor=None):
    """Returns the reads of consecutive lengths from the start, as (cursor before, tokens, cursor after)."""
    cursor, reads = cursor or Cursor.start(), []
    for num_tokens in lengths:
        tokens, after = lanes.read(lane, cursor, num_tokens)
        reads.append((cursor, tokens, after))
        cursor = after
    return reads


@given(lanes_of_corpora(), st.integers(0, 3))
def test_the_union_of_the_lanes_is_the_corpus_in_every_data_epoch(made, epoch):
    lanes, documents = made
    dealt = [lanes.document_sequence(lane, epoch) for lane in range(lanes.num_lanes)]
    assert sorted(itertools.chain.from_iterable(dealt)) == list(range(len(documents)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@given(lanes_of_corpora(), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_packing_is_the_flat_concatenation(made, lengths):
    """Prefix property: nothing lost, nothing repeated, EOS at ends of documents only, across data epochs."""
    lanes, documents = made
    for lane in range(lanes.num_lanes):
        reads = walk(lanes, lane, lengths)
        read = np.concatenate([tokens[:-1] for _, tokens, _ in reads] + [reads[-1][1][-1:]])
        epochs = [flat(documents, lanes.document_sequence(lane, epoch)) for epoch in range(sum(lengths) + 1)]
        assert np.array_equal(read, np.concatenate(epochs)[: sum(lengths) + 1])
        assert all(tokens.dtype == np.int32 and len(tokens) == n + 1 for (_, tokens, _), n in zip(reads, lengths))
        for (_, tokens, _), (_, following, _) in zip(reads, reads[1:]):
            assert tokens[-1] == following[0]


@given(lanes_of_corpora(), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_any_order_of_reads_gives_the_same(made, lengths, shuffler):
    lanes, documents = made
    reads = [(lane, *read) for lane in range(lanes.num_lanes) for read in walk(lanes, lane, lengths)]
    shuffler.shuffle(reads)
    for lane, before, tokens, after in reads:
        again, cursor = lanes.read(lane, tuple(before), len(tokens) - 1)
        assert np.array_equal(again, tokens) and cursor == after


@given(lanes_of_corpora(), st.integers(1, 30), st.integers(1, 30))
def test_a_read_may_be_cut_anywhere(made, first, second):
    lanes, _ = made
    whole, end = lanes.read(0, Cursor.start(), first + second)
    (_, head, _), (_, tail, after) = walk(lanes, 0, [first, second])
    assert np.array_equal(whole, np.concatenate([head[:-1], tail])) and after == end


@pytest.mark.parametrize(("micro_batch_size", "dp_size"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2)])
def test_every_split_of_the_slots_sees_the_same_tokens(micro_batch_size, dp_size):
    """Each replica has lanes and memory of its own and takes every dp-th micro-batch."""
    generator = random.Random(7)
    documents = Texts("".join(generator.choices("abcxyz", k=generator.randrange(40))) for _ in range(50))
    replicas = [Lanes(TokenizedDocuments(documents, Characters()), 5, 8) for _ in range(dp_size)]
    cursors, seen = [Cursor.start()] * 8, {}
    for step in range(10):
        for micro_batch in range(8 // micro_batch_size):
            lanes = replicas[micro_batch % dp_size]
            for slot in range(micro_batch * micro_batch_size, (micro_batch + 1) * micro_batch_size):
                tokens, cursors[slot] = lanes.read(slot, cursors[slot], 16)
                seen[step, slot] = tokens.tobytes()
    assert hash(tuple(sorted(seen.items()))) == hash(tuple(sorted(_one_process(documents).items())))


def _one_process(documents):
    lanes = Lanes(TokenizedDocuments(documents, Characters()), 5, 8)
    return {
        (step, slot): tokens.tobytes()
        for slot in range(8)
        for step, (_, tokens, _) in enumerate(walk(lanes, slot, [16] * 10))
    }


def test_sequential_reads_tokenise_each_document_once():
    calls = []

    class Counting(Characters):
        def encode(self, text):
            calls.append(text)
            return super().encode(text)

    documents = Texts("abc" * 20 + letter for letter in "abcdef")
    lanes = Lanes(TokenizedDocuments(documents, Counting()), 1, 2)
    walk(lanes, 0, [5] * 36)  # 180 of the 186 tokens of its 3 documents
    assert len(calls) == 3


@given(seeds, st.integers(0, 5), st.integers(0, 60))
def test_permutation(seed, epoch, length):
    assert sorted(permutation(length, seed, epoch)) == list(range(length))


def test_permutations_differ_by_seed_and_epoch_and_are_pinned():
    """The order of the data is part of every run: it must not change with a version."""
    found = {tuple(permutation(20, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(found) == 100
    first = [permutation(10, seed, 0)[0] for seed in range(2000)]
    assert max(abs(np.bincount(first, minlength=10) - 200)) < 5 * np.sqrt(200 * 0.9)
    assert permutation(8, 1234, 1).tolist() == [4, 7, 3, 2, 0, 1, 6, 5]
    assert _splitmix64(np.zeros(1, np.uint64))[0] == 0xE220A8397B1DCDAF  # the published generator's first value


def test_too_few_documents_says_what_to_do():
    with pytest.raises(DataError, match="2 documents can't feed 3 sequences a step: .*document_chars"):
        Lanes(TokenizedDocuments(Texts(["a", "b"]), Characters()), 0, 3)


@pytest.mark.parametrize("cursor", [Cursor(0, 0, 2), Cursor(0, 2, 0)])
def test_a_cursor_of_another_corpus_is_refused(cursor):
    lanes = Lanes(TokenizedDocuments(Texts(["a", "b"]), Characters()), 0, 1)
    with pytest.raises(DataError, match=re.escape(f"lane 0: {cursor} lies outside")):
        lanes.read(0, cursor, 1)


def test_a_lane_that_is_not_there():
    with pytest.raises(IndexError):
        Lanes(TokenizedDocuments(Texts(["a"]), Characters()), 0, 1).read(1, Cursor.start(), 1)
