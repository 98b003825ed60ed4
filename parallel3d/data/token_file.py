"""Files of tokens: safetensors with one tensor `tokens` of uint16 or uint32, documents in a row, each with its EOS.

    8 bytes: size of the header | header (JSON, padded with spaces) | tokens ...
    {"__metadata__": {"eos_id": "1", ...}, "tokens": {"dtype": "U16", "shape": [n], "data_offsets": [0, 2 n]}}

A file is memory-mapped one window at a time, so reading needs little memory and keeps no state. A file is written as
tokens come; its header has a fixed size and is written last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from parallel3d.errors import DataError, shorten

TENSOR = "tokens"
DTYPES: dict[str, np.dtype] = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4")}
HEADER_BYTES = 4096
"""Size of the header of a file that we write, including the 8 bytes of its length."""
MAX_HEADER_BYTES = 100 * 2**20
"""The format's own limit."""
WINDOW_TOKENS = 2**21
"""Tokens that a scan reads at once."""


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One file of tokens."""

    path: Path
    dtype: np.dtype
    data_offset: int
    """Bytes before the first token."""
    num_tokens: int
    metadata: Mapping[str, str]
    bounds: np.ndarray | None = None
    """First token of each document, and the end of the last, int64 (documents + 1,). None: each ends with EOS."""

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns `count` token ids from index `start` on, int32 (count,)."""
        return self.window(start, count).astype(np.int32)

    def window(self, start: int, count: int) -> np.ndarray:
        """Returns `count` token ids from index `start` on in the file's own type, mapped, not read."""
        if not 0 <= start <= start + count <= self.num_tokens:
            raise IndexError(f"{self.path}: tokens {start} to {start + count} of {self.num_tokens}")
        if count == 0:
            return np.zeros(0, self.dtype)
        offset = self.data_offset + start * self.dtype.itemsize
        try:
            return np.memmap(self.path, self.dtype, "r", offset, (count,))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: changed since it was indexed ({error}). Start again") from error


@dataclass(frozen=True, kw_only=True)
class PackedDocuments:
    """The documents of token files."""

    files: Sequence[TokenFile]
    document_index: np.ndarray
    """int64 (documents, 3): number of the file, first token, tokens without EOS."""
    eos_id: int

    def __len__(self) -> int:
        return len(self.document_index)

    def tokens(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number, start, count = self.document_index[index].tolist()
        return self.files[number].read(start, count)


def open_token_file(path: Path) -> TokenFile:
    """Reads the header; raises DataError unless it is an intact file with one tensor `tokens` of uint16 or uint32."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
                raise DataError(f"{path}: not a safetensors file, or truncated")
            header = json.loads(file.read(header_bytes))
        metadata = {str(name): str(value) for name, value in header.pop("__metadata__", {}).items()}
        tensor = header.get(TENSOR)
        if tensor is None:
            names = shorten(", ".join(map(repr, header)) or "none")
            raise DataError(f"{path}: no tensor {TENSOR!r}; it has {names}")
        dtype, shape = str(tensor["dtype"]), [int(size) for size in tensor["shape"]]
        begin, end = (int(offset) for offset in tensor["data_offsets"])
    except (OSError, ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = shorten(f"{type(error).__name__}: {error}")
        raise DataError(f"{path}: not a readable safetensors file ({reason})") from error
    if dtype not in DTYPES or len(shape) != 1:
        found = shorten(f"{dtype} of shape {shape}")
        raise DataError(f"{path}: {TENSOR!r} is {found}; it must be uint16 or uint32 of one dimension")
    start = 8 + header_bytes + begin
    if begin < 0 or end - begin != shape[0] * DTYPES[dtype].itemsize:
        raise DataError(f"{path}: damaged: its data_offsets don't fit {shape[0]} tokens")
    if 8 + header_bytes + end > size:
        num_whole = max(size - start, 0) // DTYPES[dtype].itemsize
        raise DataError(
            f"{path}: truncated: {size:,} bytes, its header says {8 + header_bytes + end:,}: only {num_whole:,} of"
            f" {shape[0]:,} tokens are whole"
        )
    return TokenFile(path=path, dtype=DTYPES[dtype], data_offset=start, num_tokens=shape[0], metadata=metadata)


def scan_tokens(file: TokenFile, eos_id: int, counts: np.ndarray, *, needs_eos: bool = True) -> Iterator[np.ndarray]:
    """Yields (first token, tokens without EOS) of the documents, int64 (documents, 2), some at a time.

    Adds the frequency of each id to `counts`, int64 (vocabulary,). The last document may lack its EOS. Raises DataError
    for an id outside the vocabulary, and if EOS never occurs; without `needs_eos` such a file is one document.
    """
    opened = 0  # first token, or with bounds the number, of the first document whose end was not seen yet
    for start in range(0, file.num_tokens, WINDOW_TOKENS):
        ids = file.window(start, min(WINDOW_TOKENS, file.num_tokens - start))
        is_outside = (ids >= len(counts)) | (ids < 0)
        if is_outside.any():
            at = int(np.argmax(is_outside))
            raise DataError(
                f"{file.path}: token {start + at} is {ids[at]}, outside the vocabulary of {len(counts):,}: "
                "raise model.vocab_size, or data.tokenizer.vocab_size"
            )
        counts += np.bincount(ids, minlength=len(counts))
        if file.bounds is not None:
            last = int(np.searchsorted(file.bounds, start + len(ids), side="right")) - 1
            yield _between_bounds(file.bounds[opened : last + 1], eos_id, ids, start)
            opened = last
            continue
        ends = start + np.flatnonzero(ids == eos_id)
        starts = np.append(opened, ends + 1)
        yield np.stack([starts[:-1], ends - starts[:-1]], axis=1)
        opened = int(starts[-1])
    if file.bounds is not None:
        if not file.num_tokens:
            yield _between_bounds(file.bounds, eos_id, np.zeros(0, file.dtype), 0)
        return
    if opened == 0 and file.num_tokens and needs_eos:
        raise DataError(f"{file.path}: no token is {eos_id}, which ends each document: check data.tokenizer.eos_id")
    if opened < file.num_tokens:
        yield np.array([[opened, file.num_tokens - opened]])


def _between_bounds(bounds: np.ndarray, eos_id: int, ids: np.ndarray, first: int) -> np.ndarray:
    """The rows of `scan_tokens` for documents, with or without an EOS, that end within `ids`, tokens `first` on."""
    starts, ends = bounds[:-1], bounds[1:]
    has_eos = ends > starts
    has_eos[has_eos] = ids[ends[has_eos] - 1 - first] == eos_id
    return np.stack([starts, ends - starts - has_eos], axis=1)


class TokenWriter:
    """Writes a file of tokens as they come. Until `finish` it is not a valid safetensors file."""

    def __init__(self, path: Path, vocab_size: int):
        self.num_tokens = 0
        self._name = "U16" if vocab_size <= 2**16 else "U32"
        self._file = path.open("wb")
        self._file.write(bytes(HEADER_BYTES))  # no valid header

    def append(self, ids: np.ndarray) -> None:
        """Adds whole documents, each with its EOS."""
        self._file.write(ids.astype(DTYPES[self._name]).tobytes())
        self.num_tokens += len(ids)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Writes the header, which completes the file."""
        size = self.num_tokens * DTYPES[self._name].itemsize
        tensor = {"dtype": self._name, "shape": [self.num_tokens], "data_offsets": [0, size]}
        header = json.dumps({"__metadata__": dict(metadata), TENSOR: tensor}).encode()
        room = HEADER_BYTES - 8
        assert len(header) <= room, f"a header of {len(header)} bytes"
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + header.ljust(room))

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
