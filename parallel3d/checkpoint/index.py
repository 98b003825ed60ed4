"""A checkpoint's index: its tensors, where they are stored, and the state of the run. Pure.

It is one JSON file next to the shards. Tensors are named as in the model, parts of fused parameters separately; each
exists in several *kinds*: weight (master weights where there are any), and the states of its update rule
(optim/update_rules). The rectangles ("pieces") of a tensor are the same for all of its kinds::

    tensors: layers.0.attention.q.weight: {shape: [4096, 4096], kinds: {weight: F32, moment1: F32, moment2: F32},
                                           pieces: [{file: rank-00003.safetensors, start: [0, 0], shape: [1024, 4096]}]}
    key of a piece in its file:  moment1/layers.0.attention.q.weight/0-0

The first line has the hash of all that follows, so that a changed byte is detected; the index has every shard's
checksum.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from parallel3d.errors import CheckpointError
from parallel3d.number_formats import NUMBER_FORMATS

FORMAT_VERSION = 2
INDEX = "index.json"
WEIGHT = "weight"

if TYPE_CHECKING:
    Format = str
else:
    Format = Literal[tuple(each.stored_name for each in NUMBER_FORMATS)]
"""A number format by its name in safetensors files."""

_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class IndexedChunk(_Record):
    """A rectangle of a tensor, in a file."""

    file: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class IndexedTensor(_Record):
    """One tensor of the model."""

    shape: tuple[int, ...]
    kinds: dict[str, Format]
    pieces: tuple[IndexedChunk, ...]


class IndexedFile(_Record):
    """One file of the checkpoint: its name, size and checksum."""

    name: str
    size: int
    crc32: str
    """As checksum.py computes it."""


class RankManifest(_Record):
    """The files and tensors that one rank has written."""

    file: IndexedFile | None
    tensors: dict[str, IndexedTensor]


class RunFacts(_Record):
    """Facts about the run that saved."""

    state: dict[str, Any]
    """trainer/resume.py: counters, cursors, the last entries."""
    evaluation_loss: float | None = None
    """Of the checkpoint's own step."""
    training_loss: float | None = None
    """Mean over the steps since the previous save."""
    config: dict[str, Any]
    """The resolved configuration."""
    text: dict[str, Any] = {}
    """The data fingerprint, by which two corpora differ."""
    versions: dict[str, str | None] = {}
    cpu_gemm: dict[str, str] = {}
    """The libraries of products that differ from the default; a run that resumes uses them again, for the same bits."""
    averaged: tuple[str, ...] = ()
    """For an average: the checkpoints from which it was made."""

    @property
    def seed(self) -> int:
        """run.seed, under which a user's own layers were built; 0 for weights of others."""
        seed: int = self.config.get("run", {}).get("seed", 0)
        return seed


class Index(_Record):
    """Everything about a checkpoint except its numbers."""

    format: Literal[2] = 2
    step: int
    created_at: str
    facts: RunFacts
    files: tuple[IndexedFile, ...]
    tensors: dict[str, IndexedTensor]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def has_optimizer_state(self) -> bool:
        """Whether there is more than weights, so that a run can resume."""
        return all(tensor.kinds.keys() > {WEIGHT} for tensor in self.tensors.values())


def key_of(kind: str, tensor: str, start: Iterable[int]) -> str:
    """The key of a piece in its file."""
    return f"{kind}/{tensor}/{'-'.join(map(str, start))}"


def merge_manifests(parts: Iterable[RankManifest]) -> tuple[tuple[IndexedFile, ...], dict[str, IndexedTensor]]:
    """Merges the ranks' parts into files and tensors; raises CheckpointError if they don't make up every tensor."""
    files: list[IndexedFile] = []
    tensors: dict[str, IndexedTensor] = {}
    for part in parts:
        files += [part.file] if part.file else []
        for name, tensor in part.tensors.items():
            known = tensors.get(name, tensor.model_copy(update={"pieces": ()}))
            if (known.shape, known.kinds) != (tensor.shape, tensor.kinds):
                raise CheckpointError(f"two ranks differ about {name}: {known.shape} and {tensor.shape}")
            tensors[name] = known.model_copy(update={"pieces": (*known.pieces, *tensor.pieces)})
    for problem in _gaps(tensors):
        raise CheckpointError(problem)
    return tuple(files), {name: tensors[name] for name in sorted(tensors)}


def encode_index(index: Index) -> bytes:
    """Encodes the index file."""
    body = json.dumps(index.model_dump(mode="python"), separators=(",", ":"))[1:].encode()
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def decode_index(data: bytes, where: str) -> Index:
    """Decodes the index file; raises CheckpointError, which names `where`, for anything that `encode_index` has not
    written."""
    first = _FIRST_LINE.match(data)
    if first is None or hashlib.sha256(body := data[first.end() :]).hexdigest().encode() != first[1]:
        raise CheckpointError(f"{where} is damaged: it is not what was written")
    try:
        fields = json.loads(b"{" + body)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not an index of a checkpoint: {error}") from None
    if fields.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has format {fields.get('format')!r}, this version of parallel3d reads format {FORMAT_VERSION}"
        )
    try:
        index = Index.model_validate_json(b"{" + body)
    except ValidationError as error:
        raise CheckpointError(f"{where} is not an index of a checkpoint: {error.errors()[0]['msg']}") from None
    for problem in _gaps(index.tensors, {file.name for file in index.files}):
        raise CheckpointError(f"{where}: {problem}")
    return index


def encode_manifest(part: RankManifest) -> bytes:
    return part.model_dump_json().encode()


def decode_manifest(data: bytes, where: str) -> RankManifest:
    try:
        return RankManifest.model_validate_json(data)
    except ValidationError as error:
        raise CheckpointError(f"{where} is damaged: {error.errors()[0]['msg']}") from None


def _gaps(tensors: Mapping[str, IndexedTensor], files: set[str] | None = None) -> Iterable[str]:
    """Yields sentences on incomplete tensors and on files outside of the checkpoint's folder."""
    for file in files or ():
        if PurePath(file).name != file:
            yield f"{file!r} is not the name of a file in the checkpoint's folder"
    for name, tensor in tensors.items():
        rank = len(tensor.shape)
        for tensor_chunk in tensor.pieces:
            inside = len(tensor_chunk.start) == len(tensor_chunk.shape) == rank and all(
                first >= 0 and length > 0 and first + length <= size
                for first, length, size in zip(tensor_chunk.start, tensor_chunk.shape, tensor.shape)
            )
            if not inside:
                yield f"a piece of {name} lies outside of it: {tensor_chunk.start}, {tensor_chunk.shape}"
            if files is not None and tensor_chunk.file not in files:
                yield f"{name} names a file that is not listed: {tensor_chunk.file}"
        num_elements = sum(prod(tensor_chunk.shape) for tensor_chunk in tensor.pieces)
        if num_elements != prod(tensor.shape):
            yield f"{name} has {num_elements} of its {prod(tensor.shape)} elements"
