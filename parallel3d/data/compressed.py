"""Compressed files of text, and JSON in arrays: read once, from start to end, in bounded memory.

Neither has random access, so their documents are written to a file of the cache, from which they are read.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from parallel3d.data.formats import MAX_RECORD_BYTES, JsonLines, cut_at_line_ends, lines_of_text
from parallel3d.data.sources import COMPRESSIONS
from parallel3d.errors import DataError

CHUNK_BYTES = 2**20
"""Read at once."""
FRAME_BYTES = 2**12
"""Of a .zst file, since a piece may become some thousand times as much text."""


class _Zstandard(io.RawIOBase):
    """The text of a .zst file, which may have several frames. Unlike the library's own reader it notices a missing
    end."""

    def __init__(self, file: BinaryIO):
        import zstandard  # only these files need it

        self._file, self._new_frame = file, zstandard.ZstdDecompressor().decompressobj
        self._error, self._frame = zstandard.ZstdError, cast(Any, None)
        self._ahead, self._text = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            if self._frame is None or self._frame.eof:
                self._ahead = (self._frame.unused_data if self._frame else b"") or self._file.read(FRAME_BYTES)
                if not self._ahead:
                    return 0
                self._frame = self._new_frame()
            else:
                self._ahead = self._file.read(FRAME_BYTES)
                if not self._ahead:
                    raise EOFError("the last frame has no end")
            try:
                self._text = self._frame.decompress(self._ahead)
            except self._error as error:
                raise OSError(str(error)) from error
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size


_READERS: Mapping[str, Callable[[BinaryIO], BinaryIO]] = {
    "": lambda file: file,
    ".gz": lambda file: cast(BinaryIO, gzip.GzipFile(fileobj=file)),
    ".bz2": lambda file: cast(BinaryIO, bz2.BZ2File(file)),
    ".xz": lambda file: cast(BinaryIO, lzma.LZMAFile(file)),  # noqa: SIM115
    ".zst": lambda file: cast(BinaryIO, io.BufferedReader(_Zstandard(file), CHUNK_BYTES)),
}
assert set(COMPRESSIONS) | {""} == set(_READERS)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed; raises DataError with its name and place for a damaged or truncated one."""
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    with path.open("rb") as file, _READERS[compression](file) as text:
        try:
            yield text
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            place = f"before byte {file.seek(0, io.SEEK_CUR):,} of {path.stat().st_size:,}"
            raise DataError(f"{path}: damaged or truncated {place} ({error})") from error


def extract_documents(
    path: Path, kind: str, *, text_column: str, document_chars: int, target: BinaryIO
) -> Iterator[tuple[int, int]]:
    """Writes the documents of a file to `target` and yields (offset there, number of bytes) of each. `kind` is that of
    the text in it: text, jsonl or json."""
    with opened(path) as file:
        if kind == "text":
            yield from cut_at_line_ends(_copied(lines_of_text(file, path), target), document_chars)
            return
        texts = _texts_of_lines(file, path, text_column) if kind == "jsonl" else _texts_of_json(file, path, text_column)
        position = 0
        for text in texts:
            data = text.encode()
            target.write(data)
            if data:
                yield position, len(data)
            position += len(data)


def _copied(lines: Iterator[tuple[bytes, int]], target: BinaryIO) -> Iterator[tuple[int, int]]:
    for line, num_chars in lines:
        target.write(line)
        yield len(line), num_chars


def _texts_of_lines(file: BinaryIO, path: Path, text_column: str) -> Iterator[str]:
    layout = JsonLines(text_column=text_column)
    for number, _, line in layout.lines(file, path):
        yield layout.text_of(line, f"{path}:{number}")


def _texts_of_json(file: BinaryIO, path: Path, text_column: str) -> Iterator[str]:
    """Of one array of objects, or of objects one after the other."""
    layout = JsonLines(text_column=text_column)
    for number, record in enumerate(JsonValues(file, path), start=1):
        yield layout.text_in(record, f"{path}: object {number}")


class JsonValues:
    """The values of a file's array, or of its whole text, one at a time."""

    def __init__(self, file: BinaryIO, path: Path):
        self._file, self._path = file, path
        self._decoder, self._utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._is_whole = "", 0, False
        self._num_dropped = self._num_values = 0

    def __iter__(self) -> Iterator[Any]:
        if self._next() != "[":
            while self._next():
                yield self._value()
            return
        self._at += 1
        separator = "" if self._next() == "]" else ","
        while separator == ",":
            self._next()
            yield self._value()
            separator = self._next()
            self._at += separator == ","
        if separator and separator != "]":
            raise self._error(f"{separator!r} where the array should go on")
        if self._next() != "]":
            raise self._error("truncated: the array has no end")
        self._at += 1
        if self._next():
            raise self._error("text after the end of the array")

    def _next(self) -> str:
        """The next character that is not blank; "" at the end of the file."""
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self._at += 1
            if not self._read():
                return ""

    def _value(self) -> Any:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise self._error("JSON that is nested too deeply") from error
            except ValueError as error:
                if len(self._text) - self._at > MAX_RECORD_BYTES or not self._read():
                    self._at = getattr(error, "pos", self._at)
                    reason = getattr(error, "msg", error)  # its text counts lines in the piece that is held
                    raise self._error(f"not valid JSON, or truncated ({reason})") from error
            else:
                self._at = end
                self._num_values += 1
                return value

    def _read(self) -> bool:
        """Reads on, as much as is held: a long object is not parsed again for each piece. False at the end."""
        if self._is_whole:
            return False
        held, pieces, wanted = self._text[self._at :], [], 1
        while wanted > 0 and not self._is_whole:
            chunk = self._file.read(CHUNK_BYTES)
            self._is_whole = not chunk
            try:
                pieces.append(self._utf8.decode(chunk, final=self._is_whole))
            except UnicodeDecodeError as error:
                good = error.object[: error.start].decode()
                self._at += len(held) + sum(map(len, [*pieces, good]))
                raise DataError(f"{self._path}: not valid UTF-8 ({error.reason}), {self._place()}") from error
            wanted = len(held) - sum(map(len, pieces))
        self._num_dropped += self._at
        self._text, self._at = held + "".join(pieces), 0
        return True

    def _error(self, problem: str) -> DataError:
        return DataError(f"{self._path}: {problem}, {self._place()}, behind {self._num_values:,} whole values")

    def _place(self) -> str:
        return f"at character {self._num_dropped + self._at:,}"
