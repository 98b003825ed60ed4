"""The tokenizer: no text is lost, whatever is in it."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parallel3d.data import tokenizer as module
from parallel3d.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, train_tokenizer
from parallel3d.errors import DataError

SAMPLE = ["def f(x):\n    return x + 1\n\n\nclass A:\n\tpass  # a comment\n", "the cat sat on the mat, the end.\n"] * 8


@pytest.fixture(scope="module")
def tokenizer():
    return SentencePieceTokenizer(train_tokenizer(SAMPLE, 340))


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text(" \n\t\r\0▁ade<>/s\u2028\ufeff"))
@example(text="▁")
@example(text=" ▁ ▁▁a")
@example(text="</s><unk><s><0x41>")
@example(text="  lead and trail \n\n\t\r\n ")
@example(text="\0\x01\x7f\x85\u200b\ufeff😀👩‍👩‍👧é漢\U0010ffff")
@example(text="")
def test_round_trip(tokenizer, kind, text):
    tokenizer = ByteTokenizer() if kind == "bytes" else tokenizer
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert np.array_equal(ids, tokenizer.encode(text))
    assert ids.dtype == np.int32
    assert not (ids == tokenizer.eos_id).any()
    assert kind == "bytes" or not (ids == module.UNK_ID).any()
    assert (ids < tokenizer.vocab_size).all()


def test_eos_has_no_text(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("a b"), tokenizer.eos_id]) == "a b"


def test_bytes_of_a_model_that_are_no_text_are_marked():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([*"é".encode(), 0xC3, tokenizer.eos_id, 65]) == "é\ufffdA"


def test_it_learns_newlines_and_indentation(tokenizer):
    assert len(tokenizer.encode(SAMPLE[0])) < len(SAMPLE[0]) / 2
    assert len(tokenizer.encode("\n    ")) < 5


def test_the_same_text_gives_the_same_bytes():
    assert train_tokenizer(SAMPLE, 300) == train_tokenizer(iter(SAMPLE), 300)


def test_a_small_corpus_gives_fewer_pieces():
    assert 256 < SentencePieceTokenizer(train_tokenizer(["hello world"], 4096)).vocab_size < 400


def test_impossible_vocabularies_are_refused():
    with pytest.raises(DataError, match="must be at least 258"):
        train_tokenizer(SAMPLE, 200)
    with pytest.raises(DataError, match="can't train a tokenizer of 260 pieces"):
        train_tokenizer(SAMPLE, 260)
    with pytest.raises(DataError, match="can't train"):
        train_tokenizer([], 300)


def test_a_long_text_is_encoded_in_order_piece_by_piece(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "MAX_PIECE_CHARS", 7)
    text = "def f(x):\n    return ▁x + 1😀\n" * 5
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_file_that_is_not_a_model_is_refused():
    with pytest.raises(DataError, match="my.model: not a SentencePiece model"):
        SentencePieceTokenizer(b"nonsense", name="my.model")
