"""Figures of steps as files that TensorBoard reads, written without TensorBoard.

An event file is a row of records (TensorFlow's record format), each holding one message (protocol buffer `Event`)::

    record   uint64 length | masked CRC-32C of the length | message | masked CRC-32C of the message
    Event    1: wall time (double)   2: step (varint)   3: file version (string)   5: Summary
    Summary  1: Value, repeated      Value  1: tag (string)   2: simple value (float)

All integers are little-endian; a CRC is masked by rotating it 15 bits to the right and adding a constant.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

VERSION = "brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
_MASK = 0xA282EAD8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

SKIPPED_FIELDS = ("step", "num_updates")
"""Figures of a step that say nothing as a curve."""


class TensorBoardFile:
    """One event file of a run; every call may raise OSError."""

    def __init__(self, folder: Path, *, started_at: float, history: Iterable[Mapping[str, Any]] = ()):
        """Makes the folder; `started_at` are seconds since 1970, and name the file. `history`: lines that are told
        already, so that there is one curve."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"events.out.tfevents.{started_at:.0f}.parallel3d").open("wb")
        self._file.write(encode_record(encode_event(started_at, version=VERSION)))
        for line in history:
            self.add(line, started_at)

    def add(self, line: Mapping[str, Any], wall_time: float) -> None:
        """A line of metrics.jsonl: a step's figures, or an evaluation's; other events are left out."""
        values = dict(scalars(line))
        if values:
            self._file.write(encode_record(encode_event(wall_time, step=line["step"], values=values)))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def scalars(line: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Tags and values: train/loss, train/lr, ..., and evaluation/loss."""
    kind = line.get("event", "train")
    if kind not in ("train", "evaluation") or "step" not in line:
        return
    for name, value in line.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name not in SKIPPED_FIELDS and not (kind == "evaluation" and name == "time"):
            yield f"{kind}/{name}", float(value)


def encode_event(
    wall_time: float, *, step: int = 0, version: str | None = None, values: Mapping[str, float] | None = None
) -> bytes:
    """An encoded `Event`."""
    parts = [_field(1, _FIXED64, struct.pack("<d", wall_time)), _field(2, _VARINT, _varint(step))]
    if version is not None:
        parts.append(_message(3, version.encode()))
    if values is not None:
        parts.append(_message(5, b"".join(_message(1, _value(tag, value)) for tag, value in values.items())))
    return b"".join(parts)


def encode_record(message: bytes) -> bytes:
    """A message framed with its length and checksums."""
    length = struct.pack("<Q", len(message))
    return length + _masked_crc(length) + message + _masked_crc(message)


def crc32c(data: bytes) -> int:
    """CRC-32C (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def _value(tag: str, value: float) -> bytes:
    limit = 3.4028234e38  # of a 32-bit float
    shown = math.copysign(math.inf, value) if abs(value) > limit else value
    return _message(1, tag.encode()) + _field(2, _FIXED32, struct.pack("<f", shown))


def _message(number: int, content: bytes) -> bytes:
    return _field(number, _BYTES, _varint(len(content)) + content)


def _field(number: int, kind: int, content: bytes) -> bytes:
    return _varint(number << 3 | kind) + content


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(_table_entry(byte) for byte in range(256))
