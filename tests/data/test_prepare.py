"""Text that was tokenised before is the same text: the same batches, and the same run to a checkpoint."""

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from parallel3d.config.sections.data import TokenizerConfig
from parallel3d.data import prepare as module
from parallel3d.data import tokenizer as tokenizer_module
from parallel3d.data.documents import TokenizedDocuments
from parallel3d.data.lanes import Cursor, Lanes
from parallel3d.data.prepare import plan_document_ranges, prepare
from parallel3d.data.token_file import PackedDocuments
from parallel3d.errors import DataError
from tests.data.test_columns import write_table
from tests.support.word_corpus import lines, open_words, write_words

ROOT = Path(__file__).parents[2]
NUM_LANES, LENGTH, NUM_STEPS = 4, 33, 40
TRAINED_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
"""Of a tokenizer of Hugging Face's form that was trained here."""


def hash_of_stream(documents):
    """A hash of what all lanes read in some steps, over several data epochs."""
    lanes, digest = Lanes(documents, seed=7, num_lanes=NUM_LANES), hashlib.sha256()
    cursors = [Cursor.start()] * NUM_LANES
    for _ in range(NUM_STEPS):
        for lane in range(NUM_LANES):
            tokens, cursors[lane] = lanes.read(lane, cursors[lane], LENGTH)
            digest.update(tokens.tobytes())
    return digest.hexdigest()


def write_source(folder, kind):
    """The words as documents of this kind of file."""
    folder.mkdir()
    texts = ["".join(lines()[start : start + 30]) for start in range(0, 1500, 30)]
    if kind == "txt":
        write_words(folder / "words.txt")
    elif kind == "jsonl":
        (folder / "words.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    else:
        suffix = "parquet" if kind == "parquet" else "arrow"
        write_table(folder / f"words.{suffix}", texts, kind, batch_rows=7)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tokenizer's file, so that it is trained once."""
    folder = tmp_path_factory.mktemp("tokenizer")
    corpus = open_words(write_words(folder / "words.txt"), folder / "cache")
    return corpus.folder / "tokenizer.model"


def texts_of(documents):
    return [documents.tokens(index).tolist() for index in range(len(documents))]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "stream", "compressed", "parquet"])
def test_prepared_tokens_give_the_batches_of_the_text(tmp_path, model, kind):
    settings = dict(tokenizer=TokenizerConfig(vocab_size=320, path=str(model)), test_fraction=0.1)
    text = open_words(write_source(tmp_path / "source", kind), tmp_path / "cache", **settings)
    reported = []
    done = prepare(
        text, tmp_path / "out", num_processes=2, progress=lambda size, tokens: reported.append((size, tokens))
    )
    tokens = open_words(tmp_path / "out", tmp_path / "cache")
    assert isinstance(text.train, TokenizedDocuments) and isinstance(tokens.train, PackedDocuments)
    assert hash_of_stream(tokens.train) == hash_of_stream(text.train)
    assert texts_of(tokens.validation) == texts_of(text.validation)
    assert texts_of(tokens.test) == texts_of(text.test) != []
    again = open_words(tmp_path / "out", tmp_path / "cache", test_fraction=0.1)  # it has a test: nothing more is split
    assert (again.fingerprint, len(again.test)) == (text.fingerprint, len(text.test))
    same = ("fingerprint", "num_train_tokens", "vocab_size", "document_chars", "unigram_entropy")
    assert all(getattr(tokens, name) == getattr(text, name) for name in same)
    assert tokens.tokenizer.decode(tokens.train.tokens(0)) == text.train.documents.read(0)
    assert sum(tokens for _, tokens in reported) == (
        done.num_train_tokens + done.num_validation_tokens + done.num_test_tokens
    )
    assert sum(size for size, _ in reported) == sum(
        each.documents.num_bytes.sum() for each in (text.train, text.validation, text.test)
    )


def test_the_same_text_in_every_kind_of_file_is_the_same_stream(tmp_path, model):
    tokenizer = TokenizerConfig(vocab_size=320, path=str(model))
    hashes = {
        hash_of_stream(open_words(write_source(tmp_path / kind, kind), tmp_path / "cache", tokenizer=tokenizer).train)
        for kind in ("jsonl", "file", "stream", "compressed", "parquet")
    }
    assert len(hashes) == 1


def test_a_long_document_is_cut_in_order_and_ends_once(tmp_path, model):
    """A text longer than the pieces that are tokenised, online and prepared: in order, with one EOS at its end."""
    text = "".join(lines(17_500))
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join(json.dumps({"text": each}) for each in (text, "short")))
    assert len(text) > tokenizer_module.MAX_PIECE_CHARS
    settings = {"tokenizer": TokenizerConfig(vocab_size=320, path=str(model)), "validation_fraction": 0.0}
    online = open_words(path, tmp_path / "cache", **settings)
    prepare(online, tmp_path / "out", num_processes=1, progress=lambda *_: None)
    for corpus in (online, open_words(tmp_path / "out", tmp_path / "cache")):
        ids = corpus.train.tokens(0)
        assert corpus.tokenizer.decode(ids) == text and not (ids == corpus.train.eos_id).any()
        lanes = Lanes(corpus.train, seed=1, num_lanes=1)
        read, _ = lanes.read(0, lanes.start(0), len(ids) + len(corpus.train.tokens(1)) + 1)
        assert (read == corpus.train.eos_id).sum() == 2


def test_prepared_bytes(tmp_path):
    text = open_words(write_words(tmp_path / "words.txt"), tmp_path / "cache", tokenizer=TokenizerConfig(kind="bytes"))
    prepare(text, tmp_path / "out", num_processes=1, progress=lambda *_: None)
    loaded = load_file(tmp_path / "out" / "train.safetensors")["tokens"]
    assert loaded.dtype == np.uint16 and (loaded == 256).sum() == len(text.train) and loaded[-1] == 256
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    tokens = open_words(tmp_path / "out", tmp_path / "cache")
    assert hash_of_stream(tokens.train) == hash_of_stream(text.train)
    assert tokens.tokenizer.decode(tokens.train.tokens(3)) == text.train.documents.read(3)


def test_no_validation_is_kept_as_none(tmp_path):
    settings = {"tokenizer": TokenizerConfig(kind="bytes"), "validation_fraction": 0.0}
    text = open_words(write_words(tmp_path / "words.txt"), tmp_path / "cache", **settings)
    prepare(text, tmp_path / "out", num_processes=1, progress=lambda *_: None)
    tokens = open_words(tmp_path / "out", tmp_path / "cache")  # validation_fraction 0.01 would take some
    assert len(tokens.validation) == 0 and hash_of_stream(tokens.train) == hash_of_stream(text.train)


def test_a_test_can_be_taken_of_what_was_prepared_without_one(tmp_path):
    settings = {"tokenizer": TokenizerConfig(kind="bytes"), "document_chars": 512}
    text = open_words(write_words(tmp_path / "words.txt"), tmp_path / "cache", **settings)
    prepare(text, tmp_path / "out", num_processes=1, progress=lambda *_: None)
    tokens = open_words(tmp_path / "out", tmp_path / "cache", test_fraction=0.1)
    assert texts_of(tokens.validation) == texts_of(text.validation) and len(tokens.train) < len(text.train)
    assert sorted(texts_of(tokens.train) + texts_of(tokens.test)) == sorted(texts_of(text.train))
    assert tokens.fingerprint != text.fingerprint


def test_what_was_prepared_is_not_prepared_again(tmp_path):
    text = open_words(write_words(tmp_path / "words.txt"), tmp_path / "cache", tokenizer=TokenizerConfig(kind="bytes"))
    prepare(text, tmp_path / "out", num_processes=1, progress=lambda *_: None)
    with pytest.raises(DataError, match="out exists: remove it, or give another --out"):
        prepare(text, tmp_path / "out", num_processes=1, progress=lambda *_: None)
    tokens = open_words(tmp_path / "out", tmp_path / "cache")
    with pytest.raises(DataError, match="are tokens already"):
        prepare(tokens, tmp_path / "other", num_processes=1, progress=lambda *_: None)


@pytest.mark.parametrize("when", ["writing", "reading"])
def test_an_error_halfway_leaves_nothing(tmp_path, monkeypatch, when):
    source = write_words(tmp_path / "source" / "words.txt")
    text = open_words(source, tmp_path / "cache", tokenizer=TokenizerConfig(kind="bytes"))
    monkeypatch.setattr(module, "RANGE_BYTES", 1000)
    folder = tmp_path / "target"

    def progress(size, tokens):
        if when == "writing":
            raise OSError("no space left on device")
        source.write_bytes(b"")

    reported = "no space left.*nothing was written" if when == "writing" else "words.txt: shorter than when"
    with pytest.raises(DataError, match=reported):
        prepare(text, folder / "out", num_processes=1, progress=progress)
    assert list(folder.iterdir()) == []


# --- files of tokens by others ----------------------------------------------------------------------------------------


def write_foreign_tokens(path, num_documents=50, **extra):
    """GPT-2's tokens in a file that does not record the id of EOS."""
    path.parent.mkdir(exist_ok=True)
    ids = np.concatenate([[*range(number + 1), 50256] for number in range(num_documents)])
    save_file({"tokens": ids.astype(np.uint16)}, path, **extra)
    return path


def test_tokens_of_others_need_the_id_that_ends_documents(tmp_path):
    path, cache = write_foreign_tokens(tmp_path / "alien" / "train.safetensors"), tmp_path / "cache"
    with pytest.raises(DataError, match=r"train\.safetensors doesn't record which id.*GPT-2's is 50256"):
        open_words(path, cache, tokenizer=TokenizerConfig(vocab_size=50257))
    tokenizer = TokenizerConfig(vocab_size=50257, eos_id=50256)
    corpus = open_words(path, cache, tokenizer=tokenizer, validation_fraction=0.1)
    assert (len(corpus.train), len(corpus.validation), corpus.vocab_size) == (45, 5, 50257)
    assert (corpus.tokenizer, corpus.train.eos_id) == (None, 50256)
    assert corpus.train.tokens(2).tolist() == [0, 1, 2]
    assert corpus.num_train_tokens == sum(len(corpus.train.tokens(index)) + 1 for index in range(45))
    write_foreign_tokens(path.with_name("validation.safetensors"), num_documents=9)
    corpus = open_words(path.parent, cache, tokenizer=tokenizer, validation_fraction=0.1)
    assert (len(corpus.train), len(corpus.validation)) == (50, 9)
    with pytest.raises(DataError, match="no tokens to train on"):
        open_words(path.with_name("validation.safetensors"), cache, tokenizer=tokenizer)


def test_who_says_what_ends_a_document_has_to_agree(tmp_path):
    path = write_foreign_tokens(tmp_path / "alien" / "a.safetensors", metadata={"eos_id": "50256"})
    tokenizer = TokenizerConfig(vocab_size=50257)
    assert len(open_words(path, tmp_path / "cache", tokenizer=tokenizer, validation_fraction=0.0).train) == 50
    with pytest.raises(DataError, match=r"differs: 50256 in .*a\.safetensors, 3 in data.tokenizer.eos_id"):
        open_words(path, tmp_path / "cache", tokenizer=TokenizerConfig(vocab_size=50257, eos_id=3))
    write_foreign_tokens(path, metadata={"eos_id": "0", "tokenizer": "sentencepiece"})
    with pytest.raises(
        DataError, match=r"a\.safetensors: tokens of sentencepiece tokenizers: check data.tokenizer.kind"
    ):
        open_words(path, tmp_path / "cache", tokenizer=TokenizerConfig(kind="bytes", vocab_size=50257))
    write_foreign_tokens(path, metadata={"eos_id": "end"})
    with pytest.raises(DataError, match=r"a\.safetensors: its metadata has eos_id = 'end', which is not a number"):
        open_words(path, tmp_path / "cache", tokenizer=tokenizer)
    with pytest.raises(DataError, match="data.tokenizer.eos_id is 3, but the tokenizer ends documents with 256"):
        text = write_words(tmp_path / "words.txt")
        open_words(text, tmp_path / "cache", tokenizer=TokenizerConfig(kind="bytes", eos_id=3))


@given(st.lists(st.integers(1, 3_000_000), max_size=300))
def test_parts_are_all_documents_in_order(sizes):
    parts = list(plan_document_ranges("train", np.array(sizes, np.int64)))
    assert [index for part in parts for index in range(part.first, part.end)] == list(range(len(sizes)))
    assert [part.num_bytes for part in parts] == [sum(sizes[part.first : part.end]) for part in parts]
    assert all(sum(sizes[part.first : part.end - 1]) < module.RANGE_BYTES for part in parts)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def config_file(tmp_path):
    config = {
        "model": {
            "vocab_size": 320,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "batch": {"global_batch_size": 4, "micro_batch_size": 4, "sequence_length": 16},
        "optimizer": {"learning_rate": 0.01},
        "data": {"sources": [str(write_words(tmp_path / "words.txt"))], "cache_directory": str(tmp_path / "cache")},
        "run": {"num_steps": 2, "threads_per_rank": 1, "directory": str(tmp_path / "run")},
    }
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(config))
    return path


def start(*arguments):
    command = [sys.executable, str(ROOT / "launch" / "prepare.py"), *map(str, arguments)]
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # jobs in the background begin without
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=listen
    )


def run(*arguments):
    process = start(*arguments)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.mark.slow
def test_the_command(tmp_path, config_file):
    out, model = tmp_path / "out", tmp_path / "kept" / "my.model"
    code, _, reported = run("--config", config_file, "--out", out, "--tokenizer-out", model, "--processes", 1)
    assert code == 0, reported
    assert "data.tokenizer.path" in reported and f'data.sources=["{out}"]' in reported
    assert sorted(path.name for path in out.iterdir()) == [
        "tokenizer.model",
        "train.safetensors",
        "validation.safetensors",
    ]
    assert model.read_bytes() == (out / "tokenizer.model").read_bytes()
    text = open_words(tmp_path / "words.txt", tmp_path / "cache", tokenizer=TokenizerConfig(vocab_size=320))
    assert hash_of_stream(open_words(out, tmp_path / "cache").train) == hash_of_stream(text.train)
    code, _, reported = run("--config", config_file, "--out", out)
    assert code == 2 and reported.strip() == f"{out} exists: remove it, or give another --out"


@pytest.mark.slow
def test_the_command_trains_a_byte_level_tokenizer(tmp_path, config_file):
    """Kept as a folder for other runs; the tokens are those of a run that trains its own from the same text."""
    out, kept, byte_level = tmp_path / "out", tmp_path / "kept" / "mine", "data.tokenizer.kind=byte_level_bpe"
    code, _, err = run("--config", config_file, "--out", out, "--tokenizer-out", kept, "--processes", 1, byte_level)
    assert code == 0, err
    assert {path.name for path in out.iterdir()} == {*TRAINED_FILES, "train.safetensors", "validation.safetensors"}
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == {
        name: (out / name).read_bytes() for name in TRAINED_FILES
    }
    settings = TokenizerConfig(kind="byte_level_bpe", vocab_size=320)
    text, tokens = (open_words(each, tmp_path / "cache", tokenizer=settings) for each in (tmp_path / "words.txt", out))
    assert hash_of_stream(tokens.train) == hash_of_stream(text.train) and tokens.fingerprint == text.fingerprint
    theirs = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokens.train.tokens(0).tolist() == theirs.encode(text.train.documents.read(0)).ids
    code, _, err = run("--config", config_file, "--out", tmp_path / "again", f"data.tokenizer.path={kept}")
    assert code == 0, err
    assert hash_of_stream(open_words(tmp_path / "again", tmp_path / "cache").train) == hash_of_stream(text.train)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["Ctrl-C", "term", "kill"])
def test_however_it_ends_no_partial_folder_and_no_process_remain(tmp_path, config_file, end):
    big = tmp_path / "big.txt"
    big.write_text("".join(lines()) * 400)
    process = start("--config", config_file, "--out", tmp_path / "out" / "x", "--processes", 2,
                    f'data.sources=["{big}"]', "data.tokenizer.kind=bytes", "data.document_chars=256")  # fmt: skip
    wait_until(lambda: any(path.stat().st_size for path in (tmp_path / "out").glob(".x-*/train.safetensors")), process)
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(end)
    _, err = process.communicate(timeout=300)
    assert process.returncode == (-signal.SIGKILL if end == signal.SIGKILL else 130)
    assert not (tmp_path / "out" / "x").exists()
    if end != signal.SIGKILL:
        assert "nothing was written" in err and "Traceback" not in err
        assert list((tmp_path / "out").iterdir()) == []
    wait_until(lambda: not any(is_alive(pid) for pid in children))


def wait_until(condition, process=None):
    deadline = time.monotonic() + 300
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
def test_mistakes_are_one_message(tmp_path, config_file):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    parquet = write_table(tmp_path / "a.parquet", ["x"], "parquet")
    for override, reported in (
        (f'data.sources=["{empty}"]', "data.sources has no text: "),
        (f'data.sources=["{parquet}"]', "a.parquet: no column 'body'; it has 'number', 'text'"),
    ):
        code, _, err = run("--config", config_file, "--out", tmp_path / "out", override, "data.text_column=body")
        assert code == 2 and reported in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()
    code, _, err = run("--config", config_file)
    assert code == 2 and re.search("give --out FOLDER, --tokenizer-out PATH, or both", err)
