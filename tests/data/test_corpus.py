"""The corpus: split, cut, counted, cached once."""

import math
import multiprocessing
import time

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config.sections.data import TokenizerConfig
from parallel3d.data import cache, document_index, formats, text_corpus
from parallel3d.data.corpus import load_corpus
from parallel3d.data.corpus_spec import choose_document_chars
from parallel3d.data.document_index import split
from parallel3d.data.lanes import Cursor, Lanes
from parallel3d.data.text_corpus import entropy, train_tokenizer, training_chunks
from parallel3d.data.tokenizer import ByteTokenizer
from parallel3d.errors import DataError, GenerationEnded
from parallel3d.parallel.abort import AbortToken
from tests.support.word_corpus import open_words, write_words


@pytest.fixture
def source(tmp_path):
    return write_words(tmp_path / "source" / "words.txt")


def test_documents_tokenizer_and_counts(source, tmp_path):
    corpus = open_words(source, tmp_path / "cache")
    texts = [corpus.train.documents.read(index) for index in range(len(corpus.train))]
    held_out = [corpus.validation.documents.read(index) for index in range(len(corpus.validation))]
    assert len(held_out) >= 1 and len(texts) >= 4 * 8
    assert sorted("".join(texts + held_out).splitlines()) == sorted(source.read_text().splitlines())
    tokens = [token for text in texts for token in [*corpus.tokenizer.encode(text).tolist(), corpus.tokenizer.eos_id]]
    p = [tokens.count(token) / len(tokens) for token in set(tokens)]
    assert corpus.num_train_tokens == len(tokens) and corpus.counts_are_exact
    assert corpus.unigram_entropy == pytest.approx(-sum(x * math.log(x) for x in p), rel=1e-12)
    lanes = Lanes(corpus.train, 1, 4)
    opening = corpus.tokenizer.decode(lanes.read(2, Cursor.start(), 20)[0])
    assert len(opening) > 20 and texts[lanes.document_sequence(2, 0)[0]].startswith(opening)


def test_the_second_opening_builds_nothing_and_needs_no_lock(source, tmp_path):
    logged = []
    first = open_words(source, tmp_path / "cache", log=logged.append)
    assert any("first use" in text for text in logged) and " s; kept" in logged[-1]
    logged.clear()
    (lock,) = (tmp_path / "cache").glob("*.lock")
    with cache.locked(lock, AbortToken(), logged.append):
        second = open_words(source, tmp_path / "cache", log=logged.append, token=_aborted())
    assert logged == []
    assert (second.fingerprint, second.unigram_entropy) == (first.fingerprint, first.unigram_entropy)
    assert second.train.documents.read(5) == first.train.documents.read(5)
    assert np.array_equal(load_corpus(first.folder).train.tokens(5), first.train.tokens(5))


def test_what_decides_the_content_decides_the_cache(source, tmp_path):
    def fingerprint(**settings):
        return open_words(source, tmp_path / "cache", **settings).fingerprint

    first = fingerprint()
    changed = [
        fingerprint(document_chars=512),
        fingerprint(validation_fraction=0.1),
        fingerprint(test_fraction=0.1),
        fingerprint(tokenizer=TokenizerConfig(vocab_size=300)),
        fingerprint(tokenizer=TokenizerConfig(kind="bytes")),
    ]
    source.write_text(source.read_text()[:-100])
    assert len({first, *changed, fingerprint()}) == 7


def test_the_fingerprint_does_not_know_where_the_files_are(source, tmp_path):
    moved = tmp_path / "elsewhere" / "words.txt"
    moved.parent.mkdir()
    moved.write_bytes(source.read_bytes())
    one, two = open_words(source, tmp_path / "cache"), open_words(moved, tmp_path / "other")
    assert one.fingerprint == two.fingerprint


def test_a_larger_corpus_is_counted_on_a_sample(source, tmp_path, monkeypatch):
    exact = open_words(source, tmp_path / "cache")
    monkeypatch.setattr(text_corpus, "EXACT_BYTES", 12_000)
    sampled = open_words(source, tmp_path / "other")
    assert exact.counts_are_exact and not sampled.counts_are_exact
    assert sampled.num_train_tokens == pytest.approx(exact.num_train_tokens, rel=0.02)
    assert sampled.unigram_entropy == pytest.approx(exact.unigram_entropy, rel=0.02)
    assert sampled.fingerprint == exact.fingerprint


def test_the_tokenizer_learns_from_all_of_the_corpus(source, tmp_path, monkeypatch):
    corpus = open_words(source, tmp_path / "cache", validation_fraction=0.0, document_chars=1000)
    assert len(corpus.validation) == 0
    assert "".join(training_chunks(corpus.train.documents)) == source.read_text()
    monkeypatch.setattr(text_corpus, "MAX_CHUNKS", 5)
    monkeypatch.setattr(text_corpus, "CHUNK_BYTES", 300)
    chunks = list(training_chunks(corpus.train.documents))
    positions = [source.read_text().index(chunk) / source.stat().st_size for chunk in chunks]
    assert len(chunks) in (4, 5) and np.allclose(np.diff(positions), 1 / len(chunks), atol=0.05)


def test_a_given_tokenizer_is_used_and_must_fit_the_model(source, tmp_path):
    model = tmp_path / "my.model"
    model.write_bytes(train_tokenizer(["the cat sat"], 300))
    corpus = open_words(source, tmp_path / "cache", tokenizer=TokenizerConfig(vocab_size=320, path=str(model)))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model)).vocab_size()
    assert corpus.tokenizer.vocab_size == pieces
    with pytest.raises(DataError, match=rf"has {pieces} pieces, the model a vocabulary of 265: set model.vocab_size"):
        open_words(source, tmp_path / "cache", tokenizer=TokenizerConfig(vocab_size=265, path=str(model)))
    with pytest.raises(DataError, match="nothing.model: no such file"):
        open_words(
            source, tmp_path / "cache", tokenizer=TokenizerConfig(vocab_size=320, path=str(tmp_path / "nothing.model"))
        )


def test_bytes_need_no_training(source, tmp_path):
    corpus = open_words(source, tmp_path / "cache", tokenizer=TokenizerConfig(kind="bytes"), validation_fraction=0.0)
    assert isinstance(corpus.tokenizer, ByteTokenizer)
    assert corpus.num_train_tokens == source.stat().st_size + len(corpus.train)
    assert bytes(corpus.train.tokens(0)[:20].tolist()) == source.read_bytes()[:20]


def test_a_full_disk_is_reported_and_left_as_it_was(source, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(document_index, "write_document_index", full)
    with pytest.raises(DataError, match="can't write the corpus cache .*No space left.*data.cache_directory"):
        open_words(source, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_an_unreadable_source_is_reported(source, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(formats, "lines_of_text", broken)
    with pytest.raises(DataError, match=r"words\.txt: can't be read \(Input/output error\)"):
        open_words(source, tmp_path / "cache")


def test_a_long_search_for_documents_says_how_far_it_is(source, tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(text_corpus, "LOG_INTERVAL_S", 0.0)
    open_words(source, tmp_path / "cache", log=logged.append, document_chars=1000)
    assert "indexing: 46 documents, file 1 of 1" in logged


def test_a_corpus_without_text_is_refused(source, tmp_path):
    source.write_text("")
    with pytest.raises(DataError, match=r"data\.sources has no text: .*words\.txt$"):
        open_words(source, tmp_path / "cache")


def test_a_read_only_cache_is_reported(source, tmp_path):
    with pytest.raises(DataError, match="set data.cache_directory"):
        open_words(source, source / "cache")


FRACTIONS = st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.45])


@given(st.integers(1, 5000), FRACTIONS, FRACTIONS)
def test_split(num_documents, fraction, for_test):
    parts = split(num_documents, fraction, for_test)
    assert np.array_equal(np.sort(np.concatenate([*parts.values()])), np.arange(num_documents))
    assert len(parts["train"]) >= 1
    for name, share in (("validation", fraction), ("test", for_test)):
        expected = max(1, round(num_documents * share)) if share else 0
        assert len(parts[name]) == expected or num_documents < 3, name
    if for_test == 0 and len(parts["validation"]) > 1:
        assert np.ptp(np.diff(parts["validation"])) <= 1  # evenly spread
    if for_test and len(parts["test"]) > 1:
        between_held_out = num_documents / (len(parts["validation"]) + len(parts["test"]))
        assert np.ptp(np.diff(parts["test"])) <= between_held_out + 2  # evenly among the held-out ones, to one of them


@pytest.mark.parametrize(("num_documents", "sizes"), [(0, (0, 0, 0)), (1, (1, 0, 0)), (2, (1, 1, 0)), (3, (1, 1, 1))])
def test_few_documents_are_for_training_first_then_for_validation(num_documents, sizes):
    assert tuple(map(len, split(num_documents, 0.05, 0.1).values())) == sizes


def test_split_is_99_to_1():
    parts = split(2500, 0.01)
    assert (len(parts["train"]), len(parts["validation"]), len(parts["test"])) == (2475, 25, 0)
    assert parts["validation"][:3].tolist() == [50, 150, 250]


def test_a_split_in_three():
    """85, 5 and 10 %, each spread over the corpus."""
    parts = split(2000, 0.05, 0.1)
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [1700, 100, 200]
    assert parts["validation"][:3].tolist() == [10, 30, 50]
    assert parts["test"][:4].tolist() == [3, 16, 23, 36] and parts["test"][-1] == 1996


def test_a_test_changes_the_fingerprint_and_without_one_it_stays_what_it_was(source, tmp_path):
    def corpus(**settings):
        return open_words(source, tmp_path / "cache", document_chars=512, **settings)

    plain, tested = corpus(), corpus(test_fraction=0.1)
    assert not len(plain.test) and not (plain.folder / "test.places").exists()
    assert plain.fingerprint == corpus(test_fraction=0.0).fingerprint != tested.fingerprint
    splits = (tested.train, tested.validation, tested.test)
    texts = [{documents.tokens(index).tobytes() for index in range(len(documents))} for documents in splits]
    assert len(tested.test) == round(0.1 * (len(plain.train) + len(plain.validation)))
    assert texts[2] and not texts[2] & (texts[0] | texts[1])


@given(st.integers(0, 10**13), st.integers(1, 4096), st.sampled_from([0.0, 0.01, 0.1]))
def test_documents_are_short_enough_for_every_lane_and_no_shorter_than_256(total, num_lanes, fraction):
    chars = choose_document_chars(total, num_lanes, fraction)
    assert 256 <= chars <= 65536 and chars & (chars - 1) == 0
    assert chars == 256 or total / chars >= 8 * num_lanes
    assert chars <= 4096 or total / chars * fraction >= num_lanes or fraction == 0


def test_entropy():
    assert entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(math.log(4))
    assert entropy(np.array([0, 9])) == 0


def test_a_waiting_process_is_silent_for_half_a_minute(source, tmp_path, monkeypatch):
    logged, now = [], [0.0]
    monkeypatch.setattr(cache.time, "monotonic", lambda: now[0])
    lock = tmp_path / "corpus.lock"

    class Token(AbortToken):
        def sleep(self, seconds):
            now[0] += seconds
            assert logged == [] or now[0] > cache.LOCK_LOG_AFTER_S
            if now[0] > 2 * cache.LOCK_LOG_AFTER_S:
                self.abort("long enough")
            self.check()

    with (
        cache.locked(lock, AbortToken(), print),
        pytest.raises(GenerationEnded),
        cache.locked(lock, Token(), logged.append),
    ):
        pass
    assert logged == ["waiting for another process that builds corpus"]


def test_a_waiting_process_obeys_the_token(source, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_LOG_AFTER_S", 0.0)
    token, logged = AbortToken(), []
    open_words(source, tmp_path / "cache")
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    folder.rename(tmp_path / "away")

    def on_log(text):
        logged.append(text)
        token.abort("replica (1, 0) died")

    lock = folder.with_suffix(".lock")
    with cache.locked(lock, AbortToken(), print), pytest.raises(GenerationEnded, match="replica"):
        open_words(source, tmp_path / "cache", token=token, log=on_log)
    assert ["waiting for another process" in text for text in logged] == [True]


def test_what_a_dead_builder_left_is_thrown_away(source, tmp_path, monkeypatch):
    monkeypatch.setattr(cache.os, "replace", _die)
    with pytest.raises(KeyboardInterrupt):
        open_words(source, tmp_path / "cache")
    monkeypatch.undo()
    (left,) = (tmp_path / "cache").glob("*.building")
    (left / "rubbish").write_text("x")
    corpus = open_words(source, tmp_path / "cache")
    assert len(corpus.train) > 8
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert sorted(path.name for path in folder.iterdir()) == [
        "corpus.json",
        "tokenizer.model",
        "train.places",
        "validation.places",
    ]


def _aborted():
    token = AbortToken()
    token.abort("this would have to wait")
    return token


def _die(*_):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_of_several_processes_one_builds_and_one_that_is_killed_is_replaced(source, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_LOG_AFTER_S", 0.0)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    first = context.Process(target=_build_and_hang, args=(source, tmp_path / "cache", results))
    first.start()
    assert results.get(timeout=300) == "building"
    others = [context.Process(target=_build, args=(source, tmp_path / "cache", results)) for _ in range(3)]
    for process in others:
        process.start()
    waiting = [results.get(timeout=300) for _ in others]
    assert waiting == ["waiting"] * 3
    first.kill()
    reports = [results.get(timeout=300) for _ in others]
    for process in [first, *others]:
        process.join(timeout=300)
    assert [process.exitcode for process in others] == [0, 0, 0]
    assert sum(built for built, _ in reports) == 1
    assert len({fingerprint for _, fingerprint in reports}) == 1


def _build_and_hang(source, cache, results):
    def log(text):
        if "training a tokenizer" in text:
            results.put("building")
            time.sleep(60)

    open_words(source, cache, log=log)


def _build(source, cache, results):
    logged = []

    def log(text):
        logged.append(text)
        if "waiting" in text:
            results.put("waiting")

    corpus = open_words(source, cache, log=log)
    results.put((any("first use" in text for text in logged), corpus.fingerprint))


def test_the_built_in_corpus(tmp_path):
    corpus = open_words(None, tmp_path, sources=[], num_lanes=16, tokenizer=TokenizerConfig(vocab_size=1024))
    assert len(corpus.train) > 1000 and len(corpus.validation) >= 16
    assert corpus.num_train_tokens > 1_000_000 and corpus.tokenizer.vocab_size == 1024
    assert 4 < corpus.unigram_entropy < math.log(1024)
