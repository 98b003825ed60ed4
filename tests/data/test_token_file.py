"""Files of tokens: written as they come, read anywhere, their documents found; bad ones are named."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from parallel3d.data import token_file as module
from parallel3d.data.token_file import PackedDocuments, TokenWriter, open_token_file, scan_tokens
from parallel3d.errors import DataError

EOS = 0


def write_tokens(path, ids, *, dtype=np.uint16, name="tokens", metadata=None):
    save_file({name: np.array(ids, dtype)}, path, metadata)
    return path


def scan(path, *, eos_id=EOS, vocab_size=100):
    file, counts = open_token_file(path), np.zeros(vocab_size, np.int64)
    rows = np.concatenate([np.zeros((0, 2), np.int64), *scan_tokens(file, eos_id, counts)])
    document_index = np.insert(rows, 0, 0, axis=1)
    return PackedDocuments(files=[file], document_index=document_index, eos_id=eos_id), counts


@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=80),
    window=st.integers(1, 100),
    dtype=st.sampled_from([np.uint16, np.uint32]),
)
def test_documents_are_what_lies_between_ends(tmp_path_factory, ids, window, dtype):
    ids = [*ids, EOS] if EOS not in ids else ids
    path = write_tokens(tmp_path_factory.mktemp("tokens") / "a.safetensors", ids, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW_TOKENS", window)
        documents, counts = scan(path)
    assert [documents.tokens(index).tolist() for index in range(len(documents))] == _split(ids)
    assert all(documents.tokens(index).dtype == np.int32 for index in range(len(documents)))
    assert counts.tolist() == np.bincount(ids, minlength=100).tolist()


def _split(ids):
    """Documents by hand: each ends with EOS, but perhaps the last."""
    parts = [[]]
    for token in ids:
        if token == EOS:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts if parts[-1] else parts[:-1]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_what_is_written_in_parts_is_a_safetensors_file(tmp_path, vocab_size, dtype):
    path = tmp_path / "a.safetensors"
    parts = [np.array([5, 6, EOS]), np.array([], np.int32), np.array([vocab_size - 1, EOS])]
    with TokenWriter(path, vocab_size) as writer:
        for part in parts:
            writer.append(part)
        writer.finish({"eos_id": "0"})
    loaded = load_file(path)["tokens"]
    assert loaded.dtype == dtype and loaded.tolist() == np.concatenate(parts).tolist()
    file = open_token_file(path)
    assert (file.num_tokens, file.metadata) == (5, {"eos_id": "0"})
    assert file.read(1, 3).tolist() == [6, EOS, vocab_size - 1]


def test_a_file_without_tokens_is_one_too(tmp_path):
    with TokenWriter(tmp_path / "a.safetensors", 10) as writer:
        writer.finish({})
    assert load_file(tmp_path / "a.safetensors")["tokens"].shape == (0,)
    assert len(scan(tmp_path / "a.safetensors")[0]) == 0


def test_an_unfinished_file_is_not_taken_for_a_whole_one(tmp_path):
    path = tmp_path / "a.safetensors"
    with TokenWriter(path, 10) as writer:
        writer.append(np.array([1, EOS]))
    with pytest.raises(DataError, match="a.safetensors: not a safetensors file"):
        open_token_file(path)


def test_reads_stay_inside(tmp_path):
    documents, _ = scan(write_tokens(tmp_path / "a.safetensors", [1, EOS, 2, EOS]))
    for start, count in ((-1, 1), (3, 2), (5, 0)):
        with pytest.raises(IndexError):
            documents.files[0].read(start, count)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            documents.tokens(index)
    with pytest.raises(TypeError):
        documents.tokens(slice(0, 2))


def test_wrong_tensors_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(DataError, match="no tensor 'tokens'; it has 'weights'"):
        open_token_file(write_tokens(path, [1], name="weights"))
    with pytest.raises(DataError, match=r"'tokens' is I64 of shape \[1\]; it must be uint16 or uint32"):
        open_token_file(write_tokens(path, [1], dtype=np.int64))
    with pytest.raises(DataError, match=r"'tokens' is U16 of shape \[1, 2\]"):
        open_token_file(write_tokens(path, [[1, 2]]))


def test_ids_outside_the_vocabulary_and_a_wrong_end_are_refused(tmp_path):
    path = write_tokens(tmp_path / "a.safetensors", [1, 2, EOS, 50256, 3, EOS])
    with pytest.raises(
        DataError, match="a.safetensors: token 3 is 50256, outside the vocabulary of 100: raise model.vocab"
    ):
        scan(path)
    with pytest.raises(DataError, match="no token is 7, which ends each document: check data.tokenizer.eos_id"):
        scan(path, eos_id=7, vocab_size=50257)


@pytest.mark.parametrize("size", [0, 5, 8, 40, 200, -1])
def test_a_truncated_file_is_refused(tmp_path, size):
    path = write_tokens(tmp_path / "a.safetensors", range(1000))
    path.write_bytes(path.read_bytes()[:size])
    whole = {200: 60, -1: 999}.get(size)  # behind a header of 80 bytes
    problem = f"truncated: .*: only {whole} of 1,000 tokens are whole" if whole else "not a safetensors file"
    with pytest.raises(DataError, match=rf"a\.safetensors: {problem}"):
        open_token_file(path)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"tokens": {"dtype": "U16", "shape": [1e999], "data_offsets": [0, 6]}}',
        b'{"__metadata__": [1], "tokens": {"dtype": "U16", "shape": [0], "data_offsets": [0, 0]}}',
        b"{{",
        b"[1]",
        b'{"tokens": 3}',
        b'{"tokens": {"dtype": "U16"}}',
        b'{"tokens": {"dtype": [], "shape": 1}}',
    ],
)
def test_a_damaged_header_is_refused(tmp_path, header):
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DataError, match=r"a\.safetensors: not a readable safetensors file"):
        open_token_file(path)


def test_a_header_of_a_longer_file_is_refused(tmp_path):
    header = json.dumps({"tokens": {"dtype": "U16", "shape": [4], "data_offsets": [0, 6]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(DataError, match="data_offsets don't fit 4 tokens"):
        open_token_file(path)


def test_negative_offsets_are_refused(tmp_path):
    header = json.dumps({"tokens": {"dtype": "U16", "shape": [4], "data_offsets": [-10000, -9992]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(DataError, match="data_offsets don't fit 4 tokens"):
        open_token_file(path)


def test_a_file_that_shrank_while_open_is_refused(tmp_path):
    documents, _ = scan(write_tokens(tmp_path / "a.safetensors", [*range(1, 50), EOS]))
    path = documents.files[0].path
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(DataError, match=re.escape(f"{path}: changed since it was indexed")):
        documents.tokens(0)
