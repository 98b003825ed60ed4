"""Writes a snapshot as a safetensors file with the hash of its bytes, and makes a checkpoint of all ranks' parts.

The file's format is simple enough to be written straight from the snapshot (8 bytes length, a JSON header, the tensors
end to end), so that nothing is copied once more, and hashed on the way, so that nothing is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from parallel3d.checkpoint.catalogue import Catalogue
from parallel3d.checkpoint.disk import Disk
from parallel3d.checkpoint.index import (
    INDEX,
    KINDS,
    Format,
    Index,
    IndexedFile,
    IndexedPiece,
    IndexedTensor,
    Part,
    RunFacts,
    decode_part,
    encode_index,
    encode_part,
    key_of,
    merge_parts,
)
from parallel3d.checkpoint.snapshot import Snapshot

FORMATS: dict[torch.dtype, Format] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
CHUNK_BYTES = 8 << 20
NICENESS = 10

T = TypeVar("T")


class SaveAbandoned(Exception):
    """Nobody waits for this save any more."""


def shard_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def part_name(rank: int) -> str:
    return f"rank-{rank:05}.json"


def write_part(
    disk: Disk, folder: Path, rank: int, snapshot: Snapshot, *, check: Callable[[], None] = lambda: None
) -> None:
    """Writes a rank's shard, then what is in it; both are on disk when this returns. Raises OSError.

    `check` is called between chunks, and may raise to end it.
    """
    disk.make_folder(folder)
    file = _write_shard(disk, folder / shard_name(rank), snapshot, check) if snapshot.ranges else None
    disk.write_file(folder / part_name(rank), encode_part(Part(file=file, tensors=_indexed(snapshot, rank))))
    disk.sync_folder(folder)


def publish(catalogue: Catalogue, partial: Path, step: int, ranks: Sequence[int], facts: RunFacts) -> Index:
    """Makes a checkpoint of the parts that all `ranks` have on disk.

    Raises OSError, or CheckpointError when the parts do not make up the model.
    """
    disk = catalogue.disk
    parts = [decode_part((partial / part_name(rank)).read_bytes(), part_name(rank)) for rank in ranks]
    files, tensors = merge_parts(parts)
    index = Index(
        step=step,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        facts=facts,
        files=files,
        tensors=tensors,
    )
    listed = {file.name for file in files}
    for path in sorted(partial.iterdir()):  # the parts, and what an attempt that was killed has left
        if path.name not in listed:
            disk.remove_file(path)
    disk.write_file(partial / INDEX, encode_index(index))
    disk.sync_folder(partial)
    catalogue.publish(partial, step)
    return index


def _write_shard(disk: Disk, path: Path, snapshot: Snapshot, check: Callable[[], None]) -> IndexedFile:
    header = _header(snapshot)
    digest, size = hashlib.sha256(), 0
    with disk.create(path) as file, ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash") as hasher:
        for chunk in chain([memoryview(header)], _chunks(snapshot)):
            check()
            hashed = hasher.submit(digest.update, chunk)
            disk.write(file, chunk)
            hashed.result()  # bounded: it computes
            size += len(chunk)
        disk.sync(file)
    return IndexedFile(name=path.name, size=size, sha256=digest.hexdigest())


def _chunks(snapshot: Snapshot) -> Iterator[memoryview]:
    """The bytes of all tensors, in the header's order."""
    for part in snapshot.ranges:
        for _, _, values in part.tensors():
            data = _bytes_of(values)
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]


def _bytes_of(values: Tensor) -> memoryview:
    return memoryview(values.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _header(snapshot: Snapshot) -> bytes:
    """The file's length and header, padded so that the tensors begin at a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for part in snapshot.ranges:
        for kind, piece, values in part.tensors():
            end = offset + values.nbytes
            entries[key_of(kind, piece.tensor, piece.start)] = {
                "dtype": FORMATS[values.dtype],
                "shape": list(piece.shape),
                "data_offsets": [offset, end],
            }
            offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _indexed(snapshot: Snapshot, rank: int) -> dict[str, IndexedTensor]:
    pieces: dict[str, list[IndexedPiece]] = {name: [] for name in snapshot.shapes}
    formats: dict[str, Format] = {}
    for part in snapshot.ranges:
        for piece in part.pieces:
            pieces[piece.tensor].append(IndexedPiece(file=shard_name(rank), start=piece.start, shape=piece.shape))
            formats[piece.tensor] = FORMATS[part.states[0].dtype]
    return {
        name: IndexedTensor(shape=shape, kinds=dict.fromkeys(KINDS, formats[name]), pieces=tuple(pieces[name]))
        for name, shape in snapshot.shapes.items()
    }


class Backroom:
    """One thread that does work in order, when nobody else wants the core; a process may end before it has."""

    def __init__(self, name: str):
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._name = name

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Does `work` after what was given before; the future has its result, or what it raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._work.put((work, future))
        return future

    def _run(self) -> None:
        if sys.platform == "linux":  # where threads have priorities of their own, and hand them on
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            work, future = self._work.get()  # bounded: a daemon's, there may never be more
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - carried to whoever asks
                future.set_exception(error)
            del work, future  # a snapshot is freed as soon as it is written
