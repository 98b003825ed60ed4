"""Checkpoints of weights alone: a run can't resume from one, but can start from it (`run.initialize_from`), and tools
read it like any other. It has one file of tensors, each in one piece, and the files of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from parallel3d.checkpoint.disk import Disk, new_folder
from parallel3d.checkpoint.index import (
    INDEX,
    WEIGHT,
    Format,
    Index,
    IndexedChunk,
    IndexedTensor,
    RunFacts,
    encode_index,
    key_of,
)
from parallel3d.checkpoint.shard import StoredTensor, write_shard, write_small_file
from parallel3d.checkpoint.tensor_chunks import IntTuple

FILE = "weights.safetensors"


def write_weights(
    target: Path,
    tensors: Mapping[str, tuple[Format, IntTuple]],
    buffers: Iterable[memoryview],
    *,
    facts: RunFacts,
    step: int,
    files: Mapping[str, bytes] | None = None,
    disk: Disk | None = None,
) -> Index:
    """Writes a checkpoint of `tensors`, whose bytes in that order are `buffers`, and of small `files`.

    The folder `target` must not exist; it appears whole or not at all. Raises CheckpointError and OSError.
    """
    disk = disk or Disk()
    with new_folder(disk, target) as folder:
        stored = [
            StoredTensor(key=key_of(WEIGHT, name, (0,) * len(shape)), format=kind, shape=shape)
            for name, (kind, shape) in tensors.items()
        ]
        listed = [write_shard(disk, folder / FILE, stored, buffers)]
        listed += [write_small_file(disk, folder / name, data) for name, data in (files or {}).items()]
        index = Index(
            step=step,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            facts=facts,
            files=tuple(listed),
            tensors={name: _indexed(kind, shape) for name, (kind, shape) in sorted(tensors.items())},
        )
        disk.write_file(folder / INDEX, encode_index(index))
    return index


def _indexed(kind: Format, shape: IntTuple) -> IndexedTensor:
    tensor_chunk = IndexedChunk(file=FILE, start=(0,) * len(shape), shape=shape)
    return IndexedTensor(shape=shape, kinds={WEIGHT: kind}, pieces=(tensor_chunk,))
