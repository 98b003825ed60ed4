"""The values that a group's ranks have set in the key-value store, in one answer for all: gloo's addresses. Pure.

gloo's value in torch 2.13, whose sockaddr_storage has 16 or 28 bytes of address, and then what its stack held before:

    length (8 bytes) and host's name | 136 (8) | sockaddr_storage (128) | -1 (8) | a word for each rank (8 each)

A rank reads its word of each value. The words number its peer's connections: they are mostly the same in all values.
The answer is compressed, since addresses are mostly zeros:

    length (4 bytes) of what is the same at the end of all values, and this | length (4) and beginning of each value
"""

from __future__ import annotations

import socket
import struct
import zlib
from collections.abc import Sequence

WORD_BYTES = 8
_LENGTH = struct.Struct(">I")
_STORAGE_BYTES = 128
_END = b"\xff" * WORD_BYTES
_SIZE = struct.pack("=Q", _STORAGE_BYTES + len(_END))
_ADDRESS_BYTES = {struct.pack("=H", socket.AF_INET): 16, struct.pack("=H", socket.AF_INET6): 28}
"""By the family with which it begins."""


def encode_values(values: Sequence[bytes]) -> bytes:
    """Returns the answer with the values of all ranks, in their order."""
    ends = {value[-len(values) * WORD_BYTES :] for value in values}
    end = ends.pop() if len(ends) == 1 else b""
    parts = [end, *(value[: len(value) - len(end)] for value in values)]
    return zlib.compress(b"".join(_LENGTH.pack(len(part)) + part for part in parts))


def decode_values(answer: bytes) -> list[bytes]:
    """Returns the values of an answer."""
    encoded, parts, start = zlib.decompress(answer), list[bytes](), 0
    while start < len(encoded):
        (length,) = _LENGTH.unpack_from(encoded, start)
        start += _LENGTH.size + length
        parts.append(encoded[start - length : start])
    end, *beginnings = parts
    return [beginning + end for beginning in beginnings]


def without_padding(value: bytes, *, size: int) -> bytes:
    """Returns gloo's value with zeros where its stack shows, which take three quarters of an answer; any other value as
    it is. `size`: the number of ranks."""
    start = len(value) - size * WORD_BYTES - len(_END) - _STORAGE_BYTES
    storage, end = value[max(0, start) :][:_STORAGE_BYTES], value[start + _STORAGE_BYTES :][: len(_END)]
    num_address_bytes = _ADDRESS_BYTES.get(storage[:2])
    if start < len(_SIZE) or value[start - len(_SIZE) : start] != _SIZE or end != _END or num_address_bytes is None:
        return value
    return value[: start + num_address_bytes].ljust(start + _STORAGE_BYTES, b"\0") + value[start + _STORAGE_BYTES :]
