"""Files of tensors in safetensors' format, written straight from bytes, checksums made on the way. No torch.

The format is simple enough (8 bytes length, a JSON header, the tensors end to end) to be written without the library,
which would copy each tensor once more; and the checksum needs no second reading.
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
"""What is written at a time."""
MAX_BEHIND = 4
"""So many chunks the checksum may be behind what is written."""

FORMAT_BYTES = {each.stored_name: each.num_bytes for each in NUMBER_FORMATS}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """What a file's header says of one of its tensors."""

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
    """Writes and syncs a file of `tensors`, whose bytes, in that order, are `chunks`. Raises OSError.

    `check` is called between chunks, and may raise to end it.
    """
    checksum, size, behind = Checksum(), 0, deque[Future[None]]()
    with disk.create(path) as file, ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksum") as beside:
        for buffer in chain([memoryview(encode_header(tensors))], buffers):
            check()
            behind.append(beside.submit(checksum.update, buffer))
            disk.write(file, buffer)
            size += len(buffer)
            if len(behind) > MAX_BEHIND:
                behind.popleft().result()  # bounded: it computes
        disk.sync(file)
        for future in behind:
            future.result()  # bounded: it computes
    return IndexedFile(name=path.name, size=size, crc32=checksum.text())


def encode_header(tensors: Iterable[StoredTensor]) -> bytes:
    """The file's length and header, padded so that the tensors begin at a multiple of 8 bytes."""
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
    """The tensors in order, as many to a file as `max_bytes` allows; a larger one has a file of its own. Pure."""
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
    """Writes and syncs a small file of any kind; what an index says of it. Raises OSError."""
    disk.write_file(path, data)
    checksum = Checksum()
    checksum.update(data)
    return IndexedFile(name=path.name, size=len(data), crc32=checksum.text())
