"""Reads the records of an offline run of Weights & Biases (run-ID.wandb), by the client's own message types.

The client's Python package has no reader since its core is a program of its own. The file is a header of 7 bytes,
then a log in LevelDB's format: blocks of 32 KiB with fragments (CRC-32, length, kind, bytes), of which one or several
are a record; a record is a protobuf message.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IDENTITY = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
BLOCK_BYTES = 32 << 10
FRAGMENT = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = range(1, 5)


def read_messages(data: bytes) -> Iterator[bytes]:
    """The bytes of each record. Raises ValueError for a damaged file."""
    if not data.startswith(IDENTITY):
        raise ValueError("no header")
    position, parts = len(IDENTITY), []
    while position < len(data):
        if (left := BLOCK_BYTES - position % BLOCK_BYTES) < FRAGMENT.size:
            position += left
            continue
        checksum, length, kind = FRAGMENT.unpack_from(data, position)
        position += FRAGMENT.size
        part = data[position : position + length]
        if len(part) != length or zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            raise ValueError(f"a damaged fragment before byte {position + length}")
        if (kind in (FULL, FIRST)) != (not parts):
            raise ValueError(f"a fragment of kind {kind} at byte {position}")
        position += length
        parts.append(part)
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []


def read_records(path: Path) -> list[Any]:
    """All records of a file, as wandb.proto.wandb_internal_pb2.Record."""
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(message) for message in read_messages(path.read_bytes())]


def history_of(records: list[Any]) -> list[dict[str, Any]]:
    """What was logged, call by call."""
    rows = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


def record_of(records: list[Any], kind: str) -> Any:
    """The only record of a kind."""
    (found,) = [record for record in records if record.WhichOneof("record_type") == kind]
    return getattr(found, kind)
