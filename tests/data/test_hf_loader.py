"""Tokenizers of Hugging Face: the ids of transformers on the same folder, documents that EOS alone ends, errors."""

import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallel3d.config.sections.data import TokenizerConfig
from parallel3d.data import hf_loader as module
from parallel3d.data.corpus import load_corpus
from parallel3d.data.hf_loader import HuggingFaceTokenizer, open_hf_tokenizer, train_byte_level
from parallel3d.data.lanes import Lanes
from parallel3d.data.prepare import prepare
from parallel3d.data.tokenizer import train_tokenizer
from parallel3d.data.tokenizer_files import open_tokenizer
from parallel3d.errors import DataError
from tests.support.hf_tokenizers import SAMPLE, write_folder
from tests.support.tiers import examples
from tests.support.word_corpus import lines, open_words, write_words


@pytest.fixture(scope="module", params=["gpt2", "llama3", "vocab and merges"])
def pair(request, tmp_path_factory):
    """(ours, transformers') of one folder."""
    from transformers import AutoTokenizer  # takes seconds to import

    folder = write_folder(tmp_path_factory.mktemp("tokenizer") / "t", kind=request.param)
    return open_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
CLOSE_TEXT = st.text(" abcdeft\n\t'12.<|>漢ßö😀\ufeff\0\u00a0", max_size=60)


@settings(max_examples=examples(200))
@given(ANY_TEXT | CLOSE_TEXT)
@example("")
@example("  lead and trail \n\n\t\r\n 's 'S 12345 \n\n  x")
@example("the cat's mat; Größe, 漢字 😀👩‍👩‍👧é\0\x7f\u200b\ufeff\U0010ffff\u0301")
@example("a<|endoftext|>b <|end_of_text|><|eot_id|> <|begin_of_text|>c<tool>d")
def test_the_ids_of_transformers(pair, text):
    ours, theirs = pair
    ids = ours.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ours.decode(ids) == text == ours.decode([*ids, ours.eos_id])
    assert not (ids == ours.eos_id).any() and (ids < ours.vocab_size).all()
    assert (ours.eos_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))


@settings(max_examples=examples(30))
@given(ANY_TEXT)
def test_the_ids_of_transformers_as_it_is_called(pair, text):
    """Without the names of special tokens the two ways to call it are one."""
    ours, theirs = pair
    assert "<|" in text or ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=examples(100))
@given(st.text("ab \n\t.漢'1", min_size=90, max_size=300))
def test_a_long_text_is_cut_where_it_changes_no_id(pair, text):
    ours, whole = pair[0], pair[0].encode(text).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_PIECE_CHARS", 40)
        pieces = list(module.pieces_of(text))
        ids = ours.encode(text).tolist()
    assert "".join(pieces) == text and all(0 < len(piece) <= 40 for piece in pieces)
    is_safe = [left[-1] == "\n" and right[0].isalpha() for left, right in zip(pieces, pieces[1:])]
    assert not all(is_safe) or ids == whole
    assert ours.decode(ids) == text


def test_the_same_text_trains_the_same_tokenizer():
    one, two = train_byte_level(SAMPLE, 300), train_byte_level(iter(SAMPLE), 300)
    assert one.files == two.files and (one.vocab_size, one.eos_id) == (300, 0)
    assert train_byte_level(["hello"], 4096).vocab_size < 300
    with pytest.raises(DataError, match="must be at least 257"):
        train_byte_level(SAMPLE, 256)


# --- which token ends a text ------------------------------------------------------------------------------------------


def eos_of(folder, **options):
    logged = []
    return open_hf_tokenizer(folder, log=logged.append, **options).eos_id, logged


def test_the_end_of_a_text_is_found_in_each_file(tmp_path):
    folder = write_folder(tmp_path, kind="llama3")
    begin, end, turn = (open_tokenizer(folder)._tokenizer.token_to_id(f"<|{n}|>") for n in NAMES)
    assert eos_of(folder) == (turn, []) == eos_of(folder / "tokenizer.json")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, turn]}))
    found, logged = eos_of(folder)
    assert found == turn and len(logged) == 1
    assert f"end with {turn} (<|eot_id|>), from tokenizer_config.json" in logged[0]
    assert f"also name {end} (<|end_of_text|>): data.tokenizer.eos_id chooses another" in logged[0]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|end_of_text|>"}}))
    assert eos_of(folder)[0] == end
    (folder / "special_tokens_map.json").unlink()
    assert eos_of(folder)[0] == end  # the first of several
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": turn}))
    assert eos_of(folder) == (turn, [])
    assert eos_of(folder, eos_id=begin) == (begin, [])
    (folder / "config.json").unlink()
    assert eos_of(folder) == (end, [])  # the one known name


NAMES = ("begin_of_text", "end_of_text", "eot_id")


def test_an_end_that_is_not_to_be_found(tmp_path):
    folder = write_folder(tmp_path, settings={"eos_token": "<end>"})
    with pytest.raises(DataError, match=r"tokenizer_config.json ends texts with '<end>', which tokenizer.json lacks"):
        open_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("endoftext", "stop"))
    with pytest.raises(DataError, match=r"doesn't say which.*set data.tokenizer.eos_id.*special tokens: \d+ \(<\|st"):
        open_tokenizer(folder)
    with pytest.raises(DataError, match="has no token 9999"):
        open_tokenizer(folder, eos_id=9999)
    assert open_tokenizer(folder, eos_id=5).eos_id == 5
    with pytest.raises(DataError, match="has 5 in ordinary text"):
        open_tokenizer(folder, eos_id=5).encode(open_tokenizer(folder, eos_id=6)._tokenizer.id_to_token(5))


def test_damaged_and_other_folders_are_named(tmp_path):
    folder = write_folder(tmp_path / "a")
    content = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(content[:-50])
    with pytest.raises(DataError, match=r"a: not a tokenizer that tokenizers \d|tokenizer.json: not a tokenizer that"):
        open_tokenizer(folder)
    (folder / "tokenizer.json").write_bytes(content)
    (folder / "config.json").write_text("[")
    with pytest.raises(DataError, match=r"config.json: not valid JSON"):
        open_tokenizer(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: holds neither tokenizer.json.*save_pretrained writes"):
        open_tokenizer(tmp_path / "empty")
    other = write_folder(tmp_path / "b", kind="vocab and merges", settings={"tokenizer_class": "Qwen2Tokenizer"})
    with pytest.raises(DataError, match=r"read as GPT-2's, and tokenizer_config.json says Qwen2Tokenizer"):
        open_tokenizer(other)
    with pytest.raises(DataError, match=r"vocab.json: a part of a tokenizer: set data.tokenizer.path to the folder"):
        open_tokenizer(other / "vocab.json")
    (other / "tokenizer_config.json").unlink()
    (other / "merges.txt").write_text("#version\nthe end\n")
    with pytest.raises(DataError, match=r"vocab.json and merges.txt don't fit together"):
        open_tokenizer(other)


def test_the_kind_is_seen(tmp_path):
    (tmp_path / "own.model").write_bytes(train_tokenizer(SAMPLE, 300))
    assert open_tokenizer(tmp_path / "own.model").kind == "sentencepiece"
    (tmp_path / "own.model").rename(tmp_path / "tokenizer.model")
    assert open_tokenizer(tmp_path).kind == "sentencepiece"
    assert open_tokenizer(write_folder(tmp_path)).kind == "huggingface"


# --- threads ----------------------------------------------------------------------------------------------------------


def test_other_threads_run_while_it_encodes():
    """One call of the library: under Python's lock another thread would pause for all of it, whatever the machine."""
    tokenizer, text = train_byte_level(SAMPLE, 300), ("".join(SAMPLE) * 1500)[: module.MAX_PIECE_CHARS]
    assert any(longest_pause_share(tokenizer, text) < 0.5 for _ in range(8))


def longest_pause_share(tokenizer, text):
    """Of the time of a call, in a thread that does nothing but look at the clock."""
    is_done, pauses = threading.Event(), [0.0]

    def watch():
        last = time.perf_counter()
        while not is_done.is_set():
            now = time.perf_counter()
            pauses[0], last = max(pauses[0], now - last), now

    thread = threading.Thread(target=watch)
    thread.start()
    started = time.perf_counter()
    tokenizer.encode(text)
    seconds = time.perf_counter() - started
    is_done.set()
    thread.join(100)
    return pauses[0] / seconds


FORKS = """
import os, sys
from parallel3d.data.tokenizer_files import open_tokenizer
from pathlib import Path
tokenizer = open_tokenizer(Path(sys.argv[1]))
encode = tokenizer._tokenizer.encode_batch
num_threads = len(os.listdir("/proc/self/task"))  # NumPy's
ids = encode(["the cat"] * 500, add_special_tokens=False)[7].ids
assert len(os.listdir("/proc/self/task")) == num_threads, os.listdir("/proc/self/task")
pid = os.fork()
if pid == 0:
    os._exit(0 if encode(["the cat"] * 500, add_special_tokens=False)[7].ids == ids else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_it_starts_no_threads_and_survives_a_fork(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != module.PARALLELISM}
    command = [sys.executable, "-c", FORKS, str(write_folder(tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


POOL = """
import os, sys
from parallel3d.data.tokenizer_files import open_tokenizer
from pathlib import Path
encode = open_tokenizer(Path(sys.argv[1]))._tokenizer.encode_batch
num_threads = len(os.listdir("/proc/self/task"))
encode(["the cat"] * 500, add_special_tokens=False)
print(len(os.listdir("/proc/self/task")) - num_threads)
"""


@pytest.mark.parametrize(("value", "num_threads"), [("true", 3), ("false", 0)])
def test_the_librarys_own_pool_can_be_turned_on(tmp_path, value, num_threads):
    """It has as many threads as its own variable says, by default one for every core."""
    environment = {**os.environ, module.PARALLELISM: value, "RAYON_NUM_THREADS": "3"}
    command = [sys.executable, "-c", POOL, str(write_folder(tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, f"{num_threads}\n"), done.stderr


# --- as a corpus ------------------------------------------------------------------------------------------------------


def ids_of(documents):
    return [documents.tokens(index).tolist() for index in range(len(documents))]


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "given"])
def test_a_corpus_and_its_prepared_tokens(tmp_path, trained):
    folder = None if trained else write_folder(tmp_path / "t", kind="llama3")
    settings = TokenizerConfig(kind="byte_level_bpe", vocab_size=500, path=folder and str(folder))
    source, cache = write_words(tmp_path / "words.txt"), tmp_path / "cache"
    text = open_words(source, cache, tokenizer=settings, num_lanes=2)
    assert text.tokenizer.kind == "huggingface" and text.vocab_size == text.tokenizer.vocab_size <= 500
    again = load_corpus(text.folder)
    assert ids_of(again.train) == ids_of(text.train)
    prepare(text, tmp_path / "out", num_processes=1, progress=lambda *_: None)
    tokens = open_words(tmp_path / "out", cache, tokenizer=TokenizerConfig(vocab_size=500), num_lanes=2)
    assert (tokens.fingerprint, tokens.tokenizer.kind) == (text.fingerprint, "huggingface")
    assert ids_of(tokens.train) == ids_of(text.train) and ids_of(tokens.validation) == ids_of(text.validation)
    assert open_tokenizer(tmp_path / "out").files == text.tokenizer.files
    lanes = Lanes(text.train, seed=1, num_lanes=1)
    read, _ = lanes.read(0, lanes.start(0), sum(len(ids) + 1 for ids in ids_of(text.train)))
    assert (read[:-1] == text.tokenizer.eos_id).sum() == len(text.train)


def test_another_tokenizer_is_another_corpus(tmp_path):
    source, cache, folder = write_words(tmp_path / "words.txt"), tmp_path / "cache", tmp_path / "t"
    settings = TokenizerConfig(vocab_size=500, path=str(write_folder(folder, kind="llama3")))
    one = open_words(source, cache, tokenizer=settings)
    assert open_words(source, cache, tokenizer=settings).folder == one.folder
    end = open_words(source, cache, tokenizer=settings.model_copy(update={"eos_id": one.tokenizer.eos_id - 1}))
    assert end.fingerprint != one.fingerprint and end.tokenizer.eos_id == one.tokenizer.eos_id - 1
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|begin_of_text|>"}))
    two = open_words(source, cache, tokenizer=settings)
    assert two.folder != one.folder and two.fingerprint != one.fingerprint
    assert load_corpus(one.folder).tokenizer.eos_id == one.tokenizer.eos_id
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-20]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    three = open_words(source, cache, tokenizer=settings)
    assert three.fingerprint not in (one.fingerprint, two.fingerprint)


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path):
    folder = write_folder(tmp_path / "t")
    size = open_tokenizer(folder).vocab_size
    with pytest.raises(DataError, match=rf"t has {size} pieces, the model a vocabulary of 300: set model.vocab_size"):
        settings = TokenizerConfig(vocab_size=300, path=str(folder))
        open_words(write_words(tmp_path / "words.txt"), tmp_path / "cache", tokenizer=settings)


def test_ids_with_gaps_count_to_the_last(tmp_path):
    tokenizer = open_tokenizer(write_folder(tmp_path))
    content = json.loads(tokenizer.files["tokenizer.json"])
    content["model"]["vocab"]["last"] = 4711
    files = {**tokenizer.files, "tokenizer.json": json.dumps(content).encode()}
    assert HuggingFaceTokenizer(files, eos_id=0).vocab_size == 4712


def test_text_with_the_names_of_special_tokens_ends_no_document(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(json.dumps({"text": f"{line}<|endoftext|>{line}"}) for line in lines(60)))
    settings = TokenizerConfig(vocab_size=500, path=str(write_folder(tmp_path / "t")))
    corpus = open_words(source, tmp_path / "cache", tokenizer=settings)
    assert corpus.num_train_tokens == sum(len(ids) + 1 for ids in ids_of(corpus.train))
    assert "<|endoftext|>" in corpus.tokenizer.decode(corpus.train.tokens(0))
