"""The checksum of a checkpoint's file: CRC-32, which every zlib has and a core computes faster than a disk writes.

It detects all damage within any 32 consecutive bits and misses other damage once in 2^32 times; it is not a signature.
SHA-256 takes at least four times as long (docs/experiments.md).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from io import BufferedReader

BUFFER_BYTES = 1 << 20


class Checksum:
    """The running checksum of a stream of bytes."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview) -> None:
        """Adds bytes; zlib releases the interpreter's lock meanwhile."""
        self._value = zlib.crc32(data, self._value)

    def text(self) -> str:
        """Returns the checksum as eight hexadecimal digits."""
        return f"{self._value:08x}"


def checksum_of(file: BufferedReader, check: Callable[[], None] = lambda: None) -> str:
    """Returns the checksum of the rest of an open file; `check` is called from time to time and may raise."""
    checksum, buffer = Checksum(), memoryview(bytearray(BUFFER_BYTES))
    while num_read := file.readinto(buffer):
        check()
        checksum.update(buffer[:num_read])
    return checksum.text()
