"""Files of tokens of other programs give the same documents as our own; bad ones are named."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from parallel3d.config.sections.data import TokenizerConfig
from parallel3d.data import token_file as module
from parallel3d.data.corpus import load_corpus
from parallel3d.data.token_file import PackedDocuments, scan_tokens
from parallel3d.data.token_formats import MEGATRON_DTYPES, TOKEN_SUFFIXES, open_tokens
from parallel3d.errors import DataError
from tests.support.word_corpus import open_words

EOS = 9


def write_megatron(path, sequences, bounds=None, *, code=8, version=1, offsets=None):
    """As Megatron-LM's builder does: tokens one after the other, and the index beside them."""
    dtype = np.dtype(MEGATRON_DTYPES.get(code, "<u2"))
    path.write_bytes(b"".join(np.array(each, dtype).tobytes() for each in sequences))
    sizes = np.array([len(each) for each in sequences], "<i4")
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype("<i8") * dtype.itemsize if len(sizes) else sizes
    bounds = np.arange(len(sequences) + 1) if bounds is None else np.array(bounds)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(sizes), len(bounds))
    starts = np.array(starts if offsets is None else offsets, "<i8")
    path.with_suffix(".idx").write_bytes(head + sizes.tobytes() + starts.tobytes() + bounds.astype("<i8").tobytes())
    return path


def write_llm_c(path, ids, *, magic=20240520, version=1, dtype="<u2", num_tokens=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if num_tokens is None else num_tokens
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())
    return path


def write_npy(path, ids, dtype=np.uint16):
    np.save(path, np.array(ids, dtype))
    return path


def cut_npy(path, num_bytes):
    """Of 8 tokens behind a good header of 128 bytes only `num_bytes`."""
    path = write_npy(path.with_suffix(".npy"), range(8))
    path.write_bytes(path.read_bytes()[: 128 + num_bytes])


def change_size(path, sequence, size):
    """An index in which a sequence of 4 has another size."""
    index = write_megatron(path, [[1]] * 4).with_suffix(".idx")
    with index.open("r+b") as file:
        file.seek(34 + 4 * sequence)
        file.write(struct.pack("<i", size))


def write_raw(path, ids, dtype="<u2"):
    path.write_bytes(np.array(ids, dtype).tobytes())
    return path


def documents_of(path, *, vocab_size=2**17):
    file, counts = open_tokens(path), np.zeros(vocab_size, np.int64)
    rows = np.concatenate([np.zeros((0, 2), np.int64), *scan_tokens(file, EOS, counts)])
    packed = PackedDocuments(files=[file], document_index=np.insert(rows, 0, 0, axis=1), eos_id=EOS)
    assert counts.sum() == file.num_tokens
    return [packed.tokens(index).tolist() for index in range(len(packed))]


WRITERS = {
    "npy uint16": lambda folder, ids: write_npy(folder / "a.npy", ids),
    "npy uint32": lambda folder, ids: write_npy(folder / "a.npy", ids, np.uint32),
    "npy int64": lambda folder, ids: write_npy(folder / "a.npy", ids, np.int64),
    "nanoGPT": lambda folder, ids: write_raw(folder / "a.bin", ids),
    "u16": lambda folder, ids: write_raw(folder / "a.u16", ids),
    "u32": lambda folder, ids: write_raw(folder / "a.u32", ids, "<u4"),
    "llm.c": lambda folder, ids: write_llm_c(folder / "a.bin", ids),
    "llm.c Llama 3": lambda folder, ids: write_llm_c(folder / "a.bin", ids, magic=20240801, version=7, dtype="<u4"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_documents_end_with_eos(tmp_path, name):
    ids = [3, 4, EOS, EOS, 5, 6, 60_000, EOS, 7]
    assert documents_of(WRITERS[name](tmp_path, ids)) == [[3, 4], [], [5, 6, 60_000], [7]]


@pytest.mark.parametrize("code", MEGATRON_DTYPES)
@given(
    sequences=st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=6),
    cuts=st.sets(st.integers(0, 6)),
    window=st.integers(1, 9),
)
def test_megatrons_index_tells_documents_apart(tmp_path_factory, code, sequences, cuts, window):
    """Of one or several sequences, with and without an EOS at their end, and with some inside."""
    bounds = sorted({0, len(sequences), *(cut for cut in cuts if cut < len(sequences))})
    path = write_megatron(tmp_path_factory.mktemp("megatron") / "a.bin", sequences, bounds, code=code)
    expected = [sum(sequences[a:b], []) for a, b in zip(bounds, bounds[1:])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW_TOKENS", window)
        assert documents_of(path) == [each[:-1] if each[-1:] == [EOS] else each for each in expected]


def test_no_more_than_a_window_of_a_file_is_mapped_at_once(tmp_path, monkeypatch):
    """What is mapped and looked at counts as memory of the process."""
    asked, window = [], module.TokenFile.window
    record = lambda file, start, count: asked.append(count) or window(file, start, count)  # noqa: E731
    monkeypatch.setattr(module.TokenFile, "window", record)
    monkeypatch.setattr(module, "WINDOW_TOKENS", 7)
    file = open_tokens(write_megatron(tmp_path / "a.bin", [[1, 2, EOS]] * 40))
    rows = np.concatenate(list(scan_tokens(file, EOS, np.zeros(10, np.int64))))
    assert rows.tolist() == [[3 * number, 2] for number in range(40)]
    assert asked == [7] * 17 + [1]


def test_every_suffix_is_tried():
    assert {".bin", ".npy", ".u16", ".u32", ".safetensors"} == set(TOKEN_SUFFIXES)


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda path: path.with_suffix(".npy").write_bytes(b"x"), r"a\.npy: not a readable \.npy file"),
        (lambda path: np.save(path.with_suffix(".npy"), np.zeros((2, 2), "<u2")), r"a\.npy: uint16 of shape \(2, 2\)"),
        (lambda path: np.save(path.with_suffix(".npy"), np.zeros(2, "<f4")), r"a\.npy: float32 of shape \(2,\)"),
        (lambda path: np.save(path.with_suffix(".npy"), np.zeros(2, ">u2")), r"a\.npy: >u2 of shape \(2,\)"),
        (lambda path: path.write_bytes(b"xyz"), r"a\.bin: 3 bytes, not a multiple of the 2 of a token"),
        (lambda path: path.with_suffix(".u32").write_bytes(b"xyz456"), r"a\.u32: 6 bytes, not a multiple of the 4"),
        (lambda path: cut_npy(path, 7), r"a\.npy: truncated: 135 bytes, its header says 144: only 3 of 8 tokens"),
        (lambda path: cut_npy(path, 0), r"a\.npy: truncated: 128 bytes, its header says 144: only 0 of 8 tokens"),
        (
            lambda path: write_llm_c(path, [1], num_tokens=2),
            r"a\.bin: truncated: 1,026 bytes, its header says 1,028: only 1 of 2 tokens are whole",
        ),
        (lambda path: write_llm_c(path, [1], num_tokens=-2), r"a\.bin: damaged: its header says -2 tokens"),
        (lambda path: write_megatron(path, [[1]], version=2), r"a\.idx: version 2, format 8"),
        (lambda path: write_megatron(path, [[1]], code=6), r"a\.idx: version 1, format 6"),
        (lambda path: write_megatron(path, [[1], [2]], [0, 1]), r"its documents end before sequence 1 \(from 0\) of 2"),
        (lambda path: write_megatron(path, [[1], [2]], []), r"a\.idx: damaged: document 0 is missing"),
        (lambda path: write_megatron(path, [[1], [2]], [1, 2]), r"a\.idx: damaged: document 0 begins at sequence 1"),
        (
            lambda path: write_megatron(path, [[1], [2]], [0, 2, 1, 0]),
            r"a\.idx: damaged: document 1 \(from 0\) begins at sequence 2 and ends before 1, of 2",
        ),
        (
            lambda path: write_megatron(path, [[1], [2]], [0, 1, 99, 2]),
            r"a\.idx: damaged: document 1 \(from 0\) begins at sequence 1 and ends before 99, of 2",
        ),
        (lambda path: change_size(path, 2, -7), r"a\.idx: damaged: sequence 2 \(from 0\) has -7 tokens"),
        (
            lambda path: change_size(path, 1, 5),
            r"a\.idx: sequence 2 \(from 0\) begins at byte 4 of the .bin file, and those before it end at 12: dam",
        ),
        (
            lambda path: write_megatron(path, [[1], [2]], offsets=[0, 4]),
            r"a\.idx: sequence 1 \(from 0\) begins at byte 4 of the .bin file, and those before it end at 2: damaged",
        ),
        (
            lambda path: write_megatron(path, [[1, 2]]).write_bytes(b"12"),
            r"a\.bin: truncated: 2 bytes, its index says 4: only 1 of 2 tokens are whole",
        ),
        (
            lambda path: write_megatron(path, []).with_suffix(".idx").write_bytes(b"MMIDIDX\0\0x"),
            r"a\.idx: not the index",
        ),
        (
            lambda path: write_megatron(path, [[1]] * 9).with_suffix(".idx").open("r+b").truncate(60),
            r"a\.idx: truncated, or its header is damaged: 60 bytes for 9 sequences and 10 bounds",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path, write, problem):
    path = tmp_path / "a.bin"
    write(path)
    (found,) = [path for path in tmp_path.iterdir() if path.suffix != ".idx"]
    with pytest.raises(DataError, match=problem):
        open_tokens(found)


@pytest.mark.parametrize("wrong", [-1, 11])
def test_an_id_outside_the_vocabulary_is_named(tmp_path, wrong):
    path = write_npy(tmp_path / "a.npy", [1, 2, wrong], np.int32)
    with pytest.raises(DataError, match=rf"a\.npy: token 2 is {wrong}, outside the vocabulary of 11"):
        documents_of(path, vocab_size=11)


@pytest.mark.parametrize("name", ["a.npy", "a.u32", "a.bin"])
def test_a_corpus_of_it_is_that_of_a_safetensors_file(tmp_path, name):
    ids = np.random.default_rng(1).integers(0, 300, 20_000)
    ids[::50] = EOS
    ids[-1] = EOS
    save_file({"tokens": ids.astype(np.uint16)}, tmp_path / "own.safetensors")
    path = tmp_path / name
    if name == "a.bin":
        write_megatron(path, np.split(ids, np.flatnonzero(ids == EOS) + 1)[:-1])
    else:
        write_npy(path, ids) if name == "a.npy" else write_raw(path, ids, "<u4")
    settings = dict(tokenizer=TokenizerConfig(vocab_size=300, eos_id=EOS), document_chars=0)
    own, other = (open_words(each, tmp_path / "cache", **settings) for each in (tmp_path / "own.safetensors", path))
    other = load_corpus(other.folder)
    assert len(own.train) == len(other.train) and own.num_train_tokens == other.num_train_tokens
    assert own.unigram_entropy == other.unigram_entropy
    for index in range(0, len(own.train), 37):
        assert np.array_equal(own.train.tokens(index), other.train.tokens(index))
    if name == "a.bin":  # another index is another corpus
        write_megatron(path, [ids])
        assert open_words(path, tmp_path / "cache", **settings, num_lanes=1).folder != other.folder
