"""The files of a Hugging Face tokenizer give exactly our ids, for whatever text, and our text back."""

import io
import json

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallel3d.data.hf_tokenizer import hf_byte_tokenizer_files, hf_tokenizer_files, merges_of, parse_model
from parallel3d.data.tokenizer import UNK_ID, ByteTokenizer, SentencePieceTokenizer, train_tokenizer
from parallel3d.errors import DataError
from tests.support.tiers import examples

SAMPLES = {
    "code": ["def f(x):\n    return x + 1\n\n\nclass A:\n\tpass  # a comment\n", "the cat sat on the mat, the end.\n"]
    * 8,
    "runs": [
        "aaaaaaaa abababab  bbbb    aabb \n\n\n\n        a\n        abab\n----====----\n" * 4,
        " a  b   ab    ba\n" * 9,
    ],
    "languages": ["Größe, größer, am größten. Ελληνικά και ελληνικά. 漢字と漢字 😀😀 naïve café\n"] * 12,
}
MAX_LENGTH = 64


@pytest.fixture(scope="module", params=[*sorted(SAMPLES), "bytes"])
def pair(request, tmp_path_factory):
    """(ours, Hugging Face's) of one trained model, or of bytes."""
    from transformers import AutoTokenizer  # takes seconds to import

    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        ours, files = ByteTokenizer(), hf_byte_tokenizer_files(max_length=MAX_LENGTH)
    else:
        model = train_tokenizer(SAMPLES[request.param], 400)
        ours, files = SentencePieceTokenizer(model), hf_tokenizer_files(model, max_length=MAX_LENGTH)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return ours, AutoTokenizer.from_pretrained(folder)


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
CLOSE_TEXT = st.text(" ab\n\t-=▁<>/s0x41unk漢ßö\ufeff\0", max_size=60)


@settings(max_examples=examples(200))
@given(ANY_TEXT | CLOSE_TEXT)
@example("")
@example("▁ ▁▁a  ▁")
@example("</s><unk><s><0x41> </s>")
@example("  lead and trail \n\n\t\r\n ")
@example("\0\x01\x7f\x85\u200b\ufeff😀👩‍👩‍👧é漢\U0010ffff")
@example("a" * 33 + "ab" * 9 + " " * 21 + "ba" * 5)
def test_the_same_ids_and_the_same_text(pair, text):
    ours, theirs = pair
    ids = theirs(text)["input_ids"]
    assert ids == ours.encode(text).tolist()
    assert theirs.decode(ids) == text
    assert theirs.decode([*ids, ours.eos_id], skip_special_tokens=True) == text


def test_the_special_ones_and_the_length(pair):
    ours, theirs = pair
    unknown = None if isinstance(ours, ByteTokenizer) else UNK_ID
    assert (theirs.eos_token_id, theirs.unk_token_id, theirs.bos_token_id) == (ours.eos_id, unknown, None)
    assert len(theirs) == ours.vocab_size and theirs.model_max_length == MAX_LENGTH


def test_merges_are_all_pairs_best_piece_first():
    model = train_tokenizer(SAMPLES["runs"], 300)
    pieces, _, _ = parse_model(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert [piece.text for piece in pieces] == [processor.id_to_piece(i) for i in range(len(pieces))]
    assert [piece.score for piece in pieces] == [processor.get_score(i) for i in range(len(pieces))]
    merges = merges_of(pieces)
    assert merges and "".join(merges[0]) == pieces[258].text.replace("▁", " ")
    assert len(set(merges)) == len(merges)


def trained(**changes):
    model = io.BytesIO()
    settings = dict(model_type="bpe", byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False)
    settings |= dict(remove_extra_whitespaces=False, vocab_size=300, hard_vocab_limit=False, minloglevel=2)
    texts = iter(SAMPLES["code"])
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, **{**settings, **changes})
    return model.getvalue()


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(model_type="unigram"), "is not BPE"),
        (dict(byte_fallback=False, vocab_size=60), "has no byte fallback"),
        (dict(normalization_rule_name="nfkc"), "normalises text"),
        (dict(add_dummy_prefix=True), "puts a space in front"),
        (dict(remove_extra_whitespaces=True), "removes spaces"),
        (dict(user_defined_symbols=["<tool>"]), "has user-defined pieces"),
    ],
)
def test_what_could_not_be_the_same_is_refused(changes, reason):
    assert hf_tokenizer_files(trained(), max_length=8)
    with pytest.raises(DataError, match=reason):
        hf_tokenizer_files(trained(**changes), max_length=8)


def test_eos_is_the_one_that_the_model_names():
    model = trained(eos_id=2, bos_id=1, unk_id=0, eos_piece="<end>")
    settings = json.loads(hf_tokenizer_files(model, max_length=8)["tokenizer_config.json"])
    assert settings["eos_token"] == "<end>"


def test_a_file_that_is_not_a_model_is_refused():
    for data in (b"nonsense", train_tokenizer(SAMPLES["code"], 300)[:-7]):
        with pytest.raises(DataError, match="tokenizer.model is not a SentencePiece model"):
            hf_tokenizer_files(data, max_length=8)
