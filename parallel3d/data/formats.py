"""Formats: where the documents of one kind of file lie, and how to read one of them without loading the rest.

A document is a range of bytes of a file. Text lies so as it is, JSON Lines too, and so does a column of text in an
Arrow file that is not compressed (columns.py): reading at random then needs neither an index in memory nor a library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Protocol

import numpy as np

from parallel3d.data.columns import scan_arrow
from parallel3d.data.sources import SourceFile
from parallel3d.errors import DataError

MAX_LINE_BYTES = 2**20
"""Longer lines of plain text are cut: what is read at once stays small, whatever the file."""


class DocumentFormat(Protocol):
    """How documents lie in one kind of file."""

    def scan(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yields (offset, number of bytes) of each document that is not empty; raises DataError where one is bad."""
        ...

    def read(self, path: Path, offset: int, num_bytes: int) -> str:
        """Returns the document at `offset`, in the format's own unit."""
        ...


def build_formats(*, text_column: str, document_chars: int) -> Mapping[str, DocumentFormat]:
    """Returns each format under its name."""
    return {
        "text": PlainText(document_chars=document_chars),
        "jsonl": JsonLines(text_column=text_column),
        "arrow": UncompressedArrow(text_column=text_column),
        "help_topics": HelpTopics(),
    }


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """UTF-8 text as it is, cut at line ends into documents of at most `document_chars` characters (0: never cut)."""

    document_chars: int

    def scan(self, path: Path) -> Iterator[tuple[int, int]]:
        return cut_at_line_ends(_line_sizes(path), self.document_chars)

    def read(self, path: Path, offset: int, num_bytes: int) -> str:
        return _decode(_read_bytes(path, offset, num_bytes), path, offset)


@dataclass(frozen=True, kw_only=True)
class UncompressedArrow:
    """A column of an Arrow file, file or stream, that is not compressed: its text lies in the file as it is."""

    text_column: str

    def scan(self, path: Path) -> Iterator[tuple[int, int]]:
        return scan_arrow(path, self.text_column)

    def read(self, path: Path, offset: int, num_bytes: int) -> str:
        return _decode(_read_bytes(path, offset, num_bytes), path, offset)


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """One JSON object a line, its text under `text_column`; a line is a document, and null is no text."""

    text_column: str

    def scan(self, path: Path) -> Iterator[tuple[int, int]]:
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and self._text(line, f"{path}:{number}"):
                    yield offset, len(line)
                offset += len(line)

    def read(self, path: Path, offset: int, num_bytes: int) -> str:
        return self._text(_read_bytes(path, offset, num_bytes), f"{path} at byte {offset}")

    def _text(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line.decode())
            text = record[self.text_column]
            if text is None:
                return ""
            text.encode()  # a lone surrogate is legal JSON but no text
        except UnicodeError as error:
            raise DataError(f"{where}: not valid UTF-8 ({error})") from error
        except ValueError as error:
            raise DataError(f"{where}: not valid JSON ({error})") from error
        except (KeyError, TypeError, AttributeError) as error:
            names = f"; it has {', '.join(map(repr, record))}" if isinstance(record, dict) else ""
            raise DataError(
                f"{where}: no text under {self.text_column!r}{names}. data.text_column names the field to read"
            ) from error
        return text


@dataclass(frozen=True)
class HelpTopics:
    """The topics of Python's help(), by name; the offset is the topic's number."""

    def scan(self, path: Path) -> Iterator[tuple[int, int]]:
        for number, text in enumerate(self._texts()):
            yield number, len(text.encode())

    def read(self, path: Path, offset: int, num_bytes: int) -> str:
        return self._texts()[offset]

    def _texts(self) -> list[str]:
        from pydoc_data.topics import topics  # half a megabyte of text, wanted by this format only

        return [topics[name] for name in sorted(topics)]


def cut_at_line_ends(line_sizes: Iterable[tuple[int, int]], document_chars: int) -> Iterator[tuple[int, int]]:
    """Yields (byte offset, number of bytes) of consecutive documents of whole lines, of at most `document_chars`.

    `line_sizes` are (bytes, characters) of each line. A longer line is a document of its own, and a tail shorter than
    half a document stays with the one before it.
    """
    held: tuple[int, int] | None = None  # the last whole document, until we know that more than a tail follows
    start = end = num_chars = 0
    for line_bytes, line_chars in line_sizes:
        if document_chars and num_chars and num_chars + line_chars > document_chars:
            if held:
                yield held
            held = (start, end - start)
            start, num_chars = end, 0
        end += line_bytes
        num_chars += line_chars
    if held and 2 * num_chars < document_chars:
        yield held[0], end - held[0]
        return
    if held:
        yield held
    if end > start:
        yield start, end - start


@dataclass(frozen=True, kw_only=True)
class DocumentSet:
    """An ordered list of documents: where each one lies, and how to read it."""

    files: Sequence[SourceFile]
    formats: Mapping[str, DocumentFormat]
    document_index: np.ndarray
    """int64 (documents, 3): number of the file, offset, bytes."""

    def __len__(self) -> int:
        return len(self.document_index)

    @property
    def num_bytes(self) -> np.ndarray:
        """int64 (documents,): the size of each."""
        return self.document_index[:, 2]

    def read(self, index: int) -> str:
        """Returns the text of document `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number, offset, num_bytes = self.document_index[index].tolist()
        file = self.files[number]
        return self.formats[file.format].read(file.path, offset, num_bytes)


def _line_sizes(path: Path) -> Iterator[tuple[int, int]]:
    """Yields (bytes, characters) of each line, of one that is very long piece by piece."""
    offset = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES:
                line += _rest_of_character(file)
            yield len(line), len(_decode(line, path, offset))
            offset += len(line)


def _rest_of_character(file: BufferedReader) -> bytes:
    """Reads on to where a character of UTF-8 begins: at most 3 bytes."""
    rest = b""
    while len(rest) < 3 and (ahead := file.peek(1)[:1]) and ahead[0] & 0xC0 == 0x80:
        rest += file.read(1)
    return rest


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8 at byte {offset + error.start} ({error.reason})") from error


def _read_bytes(path: Path, offset: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(num_bytes)
    if len(data) != num_bytes:
        raise DataError(f"{path}: shorter than when it was indexed; start again so that the new file is indexed")
    return data
