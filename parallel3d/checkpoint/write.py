"""Writes a snapshot as a safetensors file with the checksum of its bytes, and makes a checkpoint of all ranks' parts.

The file is written straight from the snapshot: beside that the writer takes the memory of one rectangle that does not
lie in one piece, at most.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
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
from parallel3d.checkpoint.shard import CHUNK_BYTES, StoredTensor, write_listed, write_shard
from parallel3d.checkpoint.snapshot import Snapshot

FORMATS: dict[torch.dtype, Format] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
DTYPES = {name: dtype for dtype, name in FORMATS.items()}

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
    file = None
    if snapshot.ranges:
        file = write_shard(disk, folder / shard_name(rank), _stored(snapshot), _chunks(snapshot), check=check)
    disk.write_file(folder / part_name(rank), encode_part(Part(file=file, tensors=_indexed(snapshot, rank))))
    disk.sync_folder(folder)


def publish(
    catalogue: Catalogue,
    partial: Path,
    step: int,
    ranks: Sequence[int],
    facts: RunFacts,
    files: Mapping[str, bytes] | None = None,
) -> Index:
    """Makes a checkpoint of the parts that all `ranks` have on disk, and of small `files` that go with the model.

    Raises OSError, or CheckpointError when the parts do not make up the model.
    """
    disk = catalogue.disk
    parts = [decode_part((partial / part_name(rank)).read_bytes(), part_name(rank)) for rank in ranks]
    shards, tensors = merge_parts(parts)
    listed = {shard.name for shard in shards}
    for path in sorted(partial.iterdir()):  # the parts, and what an attempt that was killed has left
        if path.name not in listed:
            disk.remove_file(path)
    others = [write_listed(disk, partial / name, data) for name, data in (files or {}).items()]
    index = Index(
        step=step,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        facts=facts,
        files=(*shards, *others),
        tensors=tensors,
    )
    disk.write_file(partial / INDEX, encode_index(index))
    disk.sync_folder(partial)
    catalogue.publish(partial, step)
    return index


def _stored(snapshot: Snapshot) -> Iterator[StoredTensor]:
    """All tensors of a rank's file, in order."""
    for part in snapshot.ranges:
        for kind, piece, values in part.tensors():
            key = key_of(kind, piece.tensor, piece.start)
            yield StoredTensor(key=key, format=FORMATS[values.dtype], shape=piece.shape)


def _chunks(snapshot: Snapshot) -> Iterator[memoryview]:
    """Their bytes."""
    return (chunk for part in snapshot.ranges for _, _, values in part.tensors() for chunk in chunks_of(values))


def chunks_of(values: Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, some at a time."""
    data = bytes_of(values)
    return (data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES))


def bytes_of(values: Tensor) -> memoryview:
    """A tensor's elements, one after the other; of one in host memory that lies in one piece without a copy."""
    return memoryview(values.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


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


class Pace:
    """Breaks, so that a thread works a `share` (0 to 1) of the time, until `hurry`.

    Of what was tried (docs/experiments.md) this takes least from training: a thread of low priority gets its share as
    well, but in slices that hold up the others of a team.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic):
        self._breaks = 1.0 / share - 1.0
        self._clock = clock
        self._hurry = threading.Event()
        self._resumed_s: float | None = None

    def rest(self) -> None:
        """Sleeps as long as the work since the last call asks for, the first time not at all; `hurry` wakes it."""
        if self._resumed_s is not None and self._breaks and not self._hurry.is_set():
            self._hurry.wait(self._breaks * (self._clock() - self._resumed_s))
        self._resumed_s = self._clock()

    def hurry(self) -> None:
        """From now on without a break."""
        self._hurry.set()


class Backroom:
    """Does work in order, on a thread that lives while there is any; a process may end before it has."""

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._work: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_open = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Does `work` after what was given before; the future has its result, or what it raised."""
        future: Future[T] = Future()
        with self._lock:
            self._work.append((work, future))
            if not self._is_open:
                self._is_open = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._work:
                    self._is_open = False
                    return
                work, future = self._work.popleft()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - carried to whoever asks
                future.set_exception(error)
            del work, future  # a snapshot is freed as soon as it is written
