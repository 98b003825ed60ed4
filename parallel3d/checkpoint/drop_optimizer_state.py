"""Reduces a checkpoint to its weights, in place: a third of the bytes, from which no run can resume.

Each file is read once, from end to end, and its checksum verified; its weights are written to a new file next to it.
Then the index is replaced in one rename. Before that the checkpoint is whole; after it the files with optimizer state
are unlisted, and are removed. An interrupted call is repeated, or finished, by the next one. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from parallel3d.checkpoint.checksum import Checksum
from parallel3d.checkpoint.disk import Disk
from parallel3d.checkpoint.index import INDEX, WEIGHT, Index, IndexedFile, encode_index
from parallel3d.checkpoint.shard import WRITE_BYTES, StoredTensor, write_shard
from parallel3d.errors import CheckpointError

SUFFIX = ".safetensors"
WEIGHTS_SUFFIX = ".weights" + SUFFIX


def drop_optimizer_state(folder: Path, index: Index, disk: Disk) -> None:
    """Removes everything but its weights from the published checkpoint that `index` describes.

    Raises OSError, and CheckpointError for a damaged checkpoint, which stays as it is.
    """
    if index.has_optimizer_state:
        shards = [file for file in index.files if file.name.endswith(SUFFIX)]
        weights_only = {file.name: _write_weights_only(folder, file, disk) for file in shards}
        index = _weights_only_index(index, weights_only)
        temporary = folder / f".{INDEX}"
        disk.write_file(temporary, encode_index(index))
        disk.sync_folder(folder)
        disk.rename(temporary, folder / INDEX)
        disk.sync_folder(folder)
    listed = {INDEX, *(file.name for file in index.files)}
    for path in sorted(folder.iterdir()):
        if path.name not in listed:
            disk.remove_file(path)


def _weights_only_index(index: Index, weights_only: dict[str, IndexedFile]) -> Index:
    tensors = {}
    for name, tensor in index.tensors.items():
        pieces = tuple(
            tensor_chunk.model_copy(update={"file": weights_only[tensor_chunk.file].name})
            for tensor_chunk in tensor.pieces
        )
        tensors[name] = tensor.model_copy(update={"kinds": {WEIGHT: tensor.kinds[WEIGHT]}, "pieces": pieces})
    files = tuple(weights_only.get(file.name, file) for file in index.files)
    return index.model_copy(update={"files": files, "tensors": tensors})


def _write_weights_only(folder: Path, whole: IndexedFile, disk: Disk) -> IndexedFile:
    """Writes the weights of a file to a new file next to it."""
    path = folder / whole.name
    try:
        with path.open("rb") as source:
            header, start = _read_header(source, whole.size)
            wanted = [(name, entry) for name, entry in header.items() if name.startswith(f"{WEIGHT}/")]
            tensors = [StoredTensor(key=name, format=e["dtype"], shape=tuple(e["shape"])) for name, e in wanted]
            spans = [range(start + e["data_offsets"][0], start + e["data_offsets"][1]) for _, e in wanted]
            source.seek(0)
            buffers = _checked_spans(source, spans, whole.crc32, str(path))
            return write_shard(disk, path.with_name(path.name.removesuffix(SUFFIX) + WEIGHTS_SUFFIX), tensors, buffers)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # not a header
        raise CheckpointError(f"{path} is damaged: {error!r}") from None


def _read_header(source: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Returns the header of a file of `size` bytes, and the offset of the first tensor."""
    length = int.from_bytes(source.read(8), "little")
    header = json.loads(source.read(min(length, size)))
    header.pop("__metadata__", None)
    return header, 8 + length


def _checked_spans(source: BinaryIO, spans: list[range], crc32: str, where: str) -> Iterator[memoryview]:
    """Yields the bytes of the file within the ascending `spans`; raises CheckpointError after the last if the checksum
    differs."""
    checksum, position = Checksum(), 0
    while data := source.read(WRITE_BYTES):
        checksum.update(data)
        for span in spans:
            first, last = max(span.start, position), min(span.stop, position + len(data))
            if first < last:
                yield memoryview(data)[first - position : last - position]
        position += len(data)
    if checksum.text() != crc32:
        raise CheckpointError(f"{where} is damaged: its checksum is not that of what was written")
