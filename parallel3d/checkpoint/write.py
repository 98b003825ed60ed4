"""Writes snapshots as safetensors files with checksums, and publishes a checkpoint made of all ranks' parts.

A file is written straight from the snapshot. The writer takes at most the additional memory of one rectangle that is
not contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from parallel3d.checkpoint.directory import CheckpointDirectory
from parallel3d.checkpoint.disk import Disk
from parallel3d.checkpoint.index import (
    INDEX,
    Format,
    Index,
    IndexedChunk,
    IndexedTensor,
    RankManifest,
    RunFacts,
    decode_manifest,
    encode_index,
    encode_manifest,
    key_of,
    merge_manifests,
)
from parallel3d.checkpoint.shard import WRITE_BYTES, StoredTensor, write_shard, write_small_file
from parallel3d.checkpoint.snapshot import Snapshot
from parallel3d.precision.dtypes import FORMAT_OF

T = TypeVar("T")


class SaveCancelled(Exception):
    """The save is no longer needed."""


def shard_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def manifest_name(rank: int) -> str:
    return f"rank-{rank:05}.json"


def write_rank_files(
    disk: Disk, folder: Path, rank: int, snapshot: Snapshot, *, check: Callable[[], None] = lambda: None
) -> None:
    """Writes a rank's shard, then its manifest; both are on disk when this returns. Raises OSError.

    `check` is called between buffers, and may raise to end the write.
    """
    disk.make_folder(folder)
    file = None
    if snapshot.ranges:
        file = write_shard(disk, folder / shard_name(rank), _stored(snapshot), _buffers(snapshot), check=check)
    disk.write_file(
        folder / manifest_name(rank), encode_manifest(RankManifest(file=file, tensors=_indexed(snapshot, rank)))
    )
    disk.sync_folder(folder)


def publish(
    checkpoint_dir: CheckpointDirectory,
    partial: Path,
    step: int,
    ranks: Sequence[int],
    facts: RunFacts,
    files: Mapping[str, bytes] | None = None,
) -> Index:
    """Publishes a checkpoint of the parts that all `ranks` have on disk, and of small `files` that accompany the model.

    Raises OSError, or CheckpointError if the parts don't make up the model.
    """
    disk = checkpoint_dir.disk
    parts = [decode_manifest((partial / manifest_name(rank)).read_bytes(), manifest_name(rank)) for rank in ranks]
    shards, tensors = merge_manifests(parts)
    listed = {shard.name for shard in shards}
    for path in sorted(partial.iterdir()):  # manifests, and leftovers of an attempt that was killed
        if path.name not in listed:
            disk.remove_file(path)
    others = [write_small_file(disk, partial / name, data) for name, data in (files or {}).items()]
    index = Index(
        step=step,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        facts=facts,
        files=(*shards, *others),
        tensors=tensors,
    )
    disk.write_file(partial / INDEX, encode_index(index))
    disk.sync_folder(partial)
    checkpoint_dir.publish(partial, step)
    return index


def _stored(snapshot: Snapshot) -> Iterator[StoredTensor]:
    """All tensors of a rank's file, in order."""
    for part in snapshot.ranges:
        for kind, tensor_chunk, values in part.tensors():
            key = key_of(kind, tensor_chunk.tensor, tensor_chunk.start)
            yield StoredTensor(key=key, format=FORMAT_OF[values.dtype].stored_name, shape=tensor_chunk.shape)


def _buffers(snapshot: Snapshot) -> Iterator[memoryview]:
    """The bytes of all tensors of a rank's file."""
    return (buffer for part in snapshot.ranges for _, _, values in part.tensors() for buffer in buffers_of(values))


def buffers_of(values: Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, WRITE_BYTES at a time."""
    data = bytes_of(values)
    return (data[start : start + WRITE_BYTES] for start in range(0, len(data), WRITE_BYTES))


def bytes_of(values: Tensor) -> memoryview:
    """A tensor's elements in order, without a copy if it is contiguous in host memory."""
    return memoryview(values.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _indexed(snapshot: Snapshot, rank: int) -> dict[str, IndexedTensor]:
    pieces: dict[str, list[IndexedChunk]] = {name: [] for name in snapshot.shapes}
    kinds: dict[str, dict[str, Format]] = {}
    for part in snapshot.ranges:
        formats = {kind: FORMAT_OF[state.dtype].stored_name for kind, state in part.states.items()}
        for tensor_chunk in part.pieces:
            pieces[tensor_chunk.tensor].append(
                IndexedChunk(file=shard_name(rank), start=tensor_chunk.start, shape=tensor_chunk.shape)
            )
            kinds[tensor_chunk.tensor] = formats
    return {
        name: IndexedTensor(shape=shape, kinds=kinds[name], pieces=tuple(pieces[name]))
        for name, shape in snapshot.shapes.items()
    }
