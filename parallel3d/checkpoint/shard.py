"""Writes files in safetensors' format straight from bytes, and computes their checksums on the way. No torch.

The format is simple: 8 bytes of length, a JSON header, the tensors end to end. The library would copy each tensor once
more, and the checksum would need a second pass over the file.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

from parallel3d.checkpoint.checksum import Checksum
from parallel3d.checkpoint.disk import Disk
from parallel3d.checkpoint.index import Format, IndexedFile
from parallel3d.checkpoint.tensor_chunks import IntTuple
from parallel3d.number_formats import NUMBER_FORMATS

WRITE_BYTES = 8 << 20
"""Size of a write."""
MAX_BEHIND = 4
"""Buffers by which the checksum may lag behind the writes."""

FORMAT_BYTES = {
    **{each.stored_name: each.num_bytes for each in NUMBER_FORMATS},
    **{"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "C64": 8},  # of buffers, which no checkpoint holds
}
"""Bytes of an element."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file's header."""

    key: str
    format: Format
    shape: IntTuple

    @property
    def num_bytes(self) -> int:
        return FORMAT_BYTES[self.format] * prod(self.shape)


def write_shard(
    disk: Disk,
    path: Path,
    tensors: Iterable[StoredTensor],
    buffers: Iterable[memoryview],
    *,
    check: Callable[[], None] = lambda: None,
) -> IndexedFile:
    """Writes and syncs a file of `tensors`, whose bytes in that order are `buffers`. Raises OSError.

    `check` is called between buffers, and may raise to end the write.
    """
    checksum, size, behind = Checksum(), 0, deque[Future[None]]()
    with disk.create(path) as file, ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksum") as background:
        for buffer in chain([memoryview(encode_header(tensors))], buffers):
            check()
            behind.append(background.submit(checksum.update, buffer))
            disk.write(file, buffer)
            size += len(buffer)
            if len(behind) > MAX_BEHIND:
                behind.popleft().result()  # bounded: it computes
        disk.sync(file)
        for future in behind:
            future.result()  # bounded: it computes
    return IndexedFile(name=path.name, size=size, crc32=checksum.text())


def encode_header(tensors: Iterable[StoredTensor]) -> bytes:
    """Encodes the length and the header, padded so that the tensors begin at a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        entries[tensor.key] = {"dtype": tensor.format, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def split_into_files(tensors: Iterable[StoredTensor], max_bytes: int) -> list[list[StoredTensor]]:
    """Splits the tensors, in order, into files of at most `max_bytes`; a larger tensor has its own file. Pure."""
    files: list[list[StoredTensor]] = []
    left = 0
    for tensor in tensors:
        if not files or tensor.num_bytes > left:
            files.append([])
            left = max_bytes
        files[-1].append(tensor)
        left -= tensor.num_bytes
    return files


def write_small_file(disk: Disk, path: Path, data: bytes) -> IndexedFile:
    """Writes and syncs a small file of any kind; returns its index entry. Raises OSError."""
    disk.write_file(path, data)
    checksum = Checksum()
    checksum.update(data)
    return IndexedFile(name=path.name, size=len(data), crc32=checksum.text())
