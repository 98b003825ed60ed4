"""File formats: how to find the documents of a file, and how to read one of them without loading the rest.

A document is a range of bytes of a file. This fits plain text, JSON Lines, and a column of text in an uncompressed
Arrow file (columns.py): random access then needs neither an index in memory nor a library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import numpy as np

from parallel3d.data.columns import scan_arrow
from parallel3d.data.conversations import ChatTemplate
from parallel3d.data.marked_text import MarkedText
from parallel3d.data.sources import SourceFile
from parallel3d.errors import DataError, shorten

MAX_LINE_BYTES = 2**20
"""Longer lines of plain text are read in pieces, which limits memory."""
MAX_RECORD_BYTES = 2**26
"""Longer lines of JSON are refused: parsing one takes several times its size in memory."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class DocumentFormat(Protocol):
    """Layout of documents in one kind of file."""

    def scan(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yields (offset, number of bytes) of each document that is not empty; raises DataError for a damaged one."""
        ...

    def read(self, path: Path, offset: int, num_bytes: int) -> str:
        """Returns the document at `offset`, in the format's own unit."""
        ...


def build_formats(
    *, text_column: str, document_chars: int, chat: Mapping[str, str] | None = None
) -> Mapping[str, DocumentFormat]:
    """Returns each format under its name; with a chat template lines of JSON are conversations."""
    if chat is not None:
        return {"jsonl": ConversationLines(text_column=text_column, template=ChatTemplate(**chat))}
    return {
        "text": PlainText(document_chars=document_chars),
        "jsonl": JsonLines(text_column=text_column),
        "arrow": UncompressedArrow(text_column=text_column),
        "help_topics": HelpTopics(),
    }


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """UTF-8 text, split at line ends into documents of at most `document_chars` characters (0: not split)."""

    document_chars: int

    def scan(self, path: Path) -> Iterator[tuple[int, int]]:
        with path.open("rb") as file:
            sizes = ((len(line), num_chars) for line, num_chars in lines_of_text(file, path))
            yield from cut_at_line_ends(sizes, self.document_chars)

    def read(self, path: Path, offset: int, num_bytes: int) -> str:
        return _decode(_read_bytes(path, offset, num_bytes), path, offset)


@dataclass(frozen=True, kw_only=True)
class UncompressedArrow:
    """An uncompressed column of an Arrow IPC file or stream, whose text is plain bytes of the file."""

    text_column: str

    def scan(self, path: Path) -> Iterator[tuple[int, int]]:
        return scan_arrow(path, self.text_column)

    def read(self, path: Path, offset: int, num_bytes: int) -> str:
        return _decode(_read_bytes(path, offset, num_bytes), path, offset)


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """One JSON object per line, with its text under `text_column`. A line is a document; null is an empty one."""

    text_column: str

    def scan(self, path: Path) -> Iterator[tuple[int, int]]:
        with path.open("rb") as file:
            for number, offset, line in self.lines(file, path):
                if self.text_of(line, f"{path}:{number}"):
                    yield offset, len(line)

    def read(self, path: Path, offset: int, num_bytes: int) -> str:
        return self.text_of(_read_bytes(path, offset, num_bytes), f"{path} at byte {offset}")

    def lines(self, file: BinaryIO, path: Path) -> Iterator[tuple[int, int, bytes]]:
        """Yields (number from 1 on, offset, bytes) of each line that is not blank."""
        offset, first = 0, file.readline(MAX_RECORD_BYTES + 1)
        if first.startswith(BYTE_ORDER_MARK):
            offset, first = len(BYTE_ORDER_MARK), first.removeprefix(BYTE_ORDER_MARK)
        for number in count(1):
            line = first if number == 1 else file.readline(MAX_RECORD_BYTES + 1)
            if len(line) > MAX_RECORD_BYTES:
                most = f"{MAX_RECORD_BYTES // 2**20} MiB"
                raise DataError(f"{path}:{number}: a line of more than {most}: put one document on each line")
            if not line:
                return
            if not line.isspace():
                yield number, offset, line
            offset += len(line)

    def text_of(self, line: bytes, where: str) -> str:
        """The text of the object in a line."""
        try:
            record = json.loads(line.decode())
        except UnicodeError as error:
            raise DataError(f"{where}: not valid UTF-8 ({error})") from error
        except ValueError as error:
            raise DataError(f"{where}: not valid JSON ({error})") from error
        except RecursionError as error:
            raise DataError(f"{where}: JSON that is nested too deeply") from error
        return self.text_in(record, where, may_have_surrogates=b"\\u" in line)

    def text_in(self, record: object, where: str, *, may_have_surrogates: bool = True) -> str:
        """The text of a parsed object; only an escape can make a lone surrogate, which is legal JSON but not text."""
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise DataError(f"{where}: a document must be a JSON object, and this one is of type {kind}")
        if self.text_column not in record:
            names = shorten(", ".join(map(repr, record)))
            raise DataError(f"{where}: no field {self.text_column!r}; it has {names}. Set data.text_column to its text")
        text = record[self.text_column]
        if text is None:
            return ""
        if not isinstance(text, str):
            kind = type(text).__name__
            raise DataError(
                f"{where}: field {self.text_column!r} is of type {kind}, not text. Set data.text_column to its text"
            )
        if may_have_surrogates:
            try:
                text.encode()
            except UnicodeError as error:
                raise DataError(f"{where}: not valid UTF-8 ({error})") from error
        return text


@dataclass(frozen=True, kw_only=True)
class ConversationLines(JsonLines):
    """One conversation per line, as conversations.py describes."""

    template: ChatTemplate

    def text_in(self, record: object, where: str, *, may_have_surrogates: bool = True) -> MarkedText:
        if not isinstance(record, dict):
            raise DataError(f"{where}: a conversation must be a JSON object, and this one is {type(record).__name__}")
        text = self.template.mark(record, where)
        try:
            text.encode()
        except UnicodeError as error:
            raise DataError(f"{where}: not valid UTF-8 ({error})") from error
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
        from pydoc_data.topics import topics  # half a megabyte of text that only this format needs

        return [topics[name] for name in sorted(topics)]


def cut_at_line_ends(line_sizes: Iterable[tuple[int, int]], document_chars: int) -> Iterator[tuple[int, int]]:
    """Yields (byte offset, number of bytes) of consecutive documents of whole lines, of at most `document_chars`.

    `line_sizes` are (bytes, characters) of each line. A longer line is a document of its own. A tail shorter than half
    a document is appended to the previous one.
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
    """An ordered list of documents: the position of each, and how to read it."""

    files: Sequence[SourceFile]
    formats: Mapping[str, DocumentFormat]
    document_index: np.ndarray
    """int64 (documents, 3): number of the file, offset, bytes."""

    def __len__(self) -> int:
        return len(self.document_index)

    @property
    def num_bytes(self) -> np.ndarray:
        """Size of each document in bytes, int64 (documents,)."""
        return self.document_index[:, 2]

    def read(self, index: int) -> str:
        """Returns the text of document `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number, offset, num_bytes = self.document_index[index].tolist()
        file = self.files[number]
        return self.formats[file.format].read(file.path, offset, num_bytes)


def lines_of_text(file: BinaryIO, path: Path) -> Iterator[tuple[bytes, int]]:
    """Yields (bytes, number of characters) of each line; a very long one comes in pieces."""
    offset = 0
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            line += _rest_of_character(cast(BufferedReader, file))
        yield line, len(_decode(line, path, offset))
        offset += len(line)


def _rest_of_character(file: BufferedReader) -> bytes:
    """Reads up to the next start of a UTF-8 character: at most 3 bytes."""
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
        raise DataError(f"{path}: shorter than when it was indexed. Start again to index the new file")
    return data
