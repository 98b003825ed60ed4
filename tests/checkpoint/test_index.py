"""The index: what goes in comes out, and what is not whole is refused."""

import hashlib
import json
import math

import pytest

from parallel3d.checkpoint.index import (
    Index,
    IndexedChunk,
    IndexedFile,
    IndexedTensor,
    RankManifest,
    RunFacts,
    decode_index,
    encode_index,
    merge_manifests,
)
from parallel3d.errors import CheckpointError


def tensor(*rows, file="rank-00000.safetensors"):
    pieces = tuple(IndexedChunk(file=file, start=(a, 0), shape=(b - a, 3)) for a, b in rows)
    return IndexedTensor(shape=(4, 3), kinds={"weight": "F32"}, pieces=pieces)


def file(number):
    return IndexedFile(name=f"rank-{number:05}.safetensors", size=8, crc32="0" * 8)


def index(**changes):
    facts = RunFacts(state={"loss": math.nan, "cursors": [[0, 1, 2]]}, config={"run": {"seed": 1}})
    fields = dict(step=7, created_at="now", facts=facts, files=(file(0),), tensors={"a": tensor((0, 4))})
    return Index(**{**fields, **changes})


def signed(fields):
    """An index whose hash is right, whatever it says."""
    body = json.dumps(fields)[1:].encode()
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def test_there_and_back():
    back = decode_index(encode_index(index()), "here")
    assert back.model_copy(update={"facts": None}) == index().model_copy(update={"facts": None})
    assert math.isnan(back.facts.state["loss"]) and back.facts.state["cursors"] == [[0, 1, 2]]
    assert json.loads(encode_index(index()))["step"] == 7  # plain JSON, for anybody


def test_parts_make_the_whole():
    parts = [RankManifest(file=file(n), tensors={"a": tensor(rows)}) for n, rows in enumerate([(0, 1), (1, 4)])]
    files, tensors = merge_manifests(parts)
    assert len(files) == 2 and [tensor_chunk.shape for tensor_chunk in tensors["a"].pieces] == [(1, 3), (3, 3)]
    with pytest.raises(CheckpointError, match="a has 3 of its 12 elements"):
        merge_manifests(parts[:1])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(format=1), "format 1, this version"),
        (dict(unknown=1), "is not an index"),
        (dict(step="7"), "is not an index"),
        (dict(files=[dict(name="../x", size=1, crc32="")]), "not the name of a file"),
        (dict(files=[]), "a file that is not listed"),
        (dict(tensors={"a": tensor((0, 3)).model_dump()}), "9 of its 12"),
        (dict(tensors={"a": tensor((0, 4), (4, 5)).model_dump()}), "outside"),
    ],
)
def test_what_is_wrong_is_said(change, message):
    fields = json.loads(encode_index(index()))
    del fields["sha256"]
    with pytest.raises(CheckpointError, match=message):
        decode_index(signed({**fields, **change}), "here/index.json")


@pytest.mark.parametrize("body", [b'"step":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"what?"])
def test_what_is_not_json_is_refused_by_name(body: bytes) -> None:
    data = b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body
    with pytest.raises(CheckpointError, match="here/index.json is not an index of a checkpoint"):
        decode_index(data, "here/index.json")
