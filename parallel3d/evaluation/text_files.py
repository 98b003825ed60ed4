"""Files to evaluate on: text that is scored token by token, or passages of which the last word is to be guessed.

A file of text is one document, a line of JSON is one. Compressed files are read as well. Passages are lines of text, or
lines of JSON. Words are what blanks separate, bytes are those of UTF-8: neither depends on the tokenizer.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel3d.data.compressed import extract_documents
from parallel3d.data.formats import build_formats
from parallel3d.data.marked_text import encode_with_special
from parallel3d.data.sources import COMPRESSIONS, SourceFile, find_files
from parallel3d.data.tokenizer import Tokenizer
from parallel3d.errors import DataError
from parallel3d.evaluation.rows import ScoredRow, continuation_row, sliding_rows

READABLE = ("text", "jsonl", "json")


@dataclass(frozen=True, kw_only=True)
class NamedFile:
    """A file, and the domain that it belongs to."""

    path: Path
    domain: str | None = None


@dataclass(frozen=True, kw_only=True)
class TextSize:
    """How long a text is."""

    num_words: int
    num_bytes: int


def parse_files(texts: Sequence[str]) -> list[NamedFile]:
    """Each `PATH`, or `DOMAIN=PATH`; a path that exists is one, whatever it looks like. Raises DataError."""
    files = []
    for text in texts:
        domain, separator, path = text.partition("=")
        is_path = not separator or Path(text).exists()
        files.append(NamedFile(path=Path(text)) if is_path else NamedFile(path=Path(path), domain=domain))
    names = [str(file.path) for file in files] + list({file.domain for file in files if file.domain is not None})
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{repeated[0]} is named twice")
    return files


def read_texts(file: NamedFile, *, text_column: str) -> Iterator[str]:
    """The documents of a file, which are not empty. Raises DataError."""
    if not file.path.is_file():
        raise DataError(f"{file.path}: no such file")
    (source,) = find_files([str(file.path)])
    if source.format not in READABLE:
        raise DataError(f"{file.path}: {source.format} is not read here, but text and lines of JSON")
    try:
        yield from _documents(source, text_column)
    except DataError as error:
        raise DataError(str(error).replace("data.text_column", "--text-column")) from None


def _documents(source: SourceFile, text_column: str) -> Iterator[str]:
    formats = build_formats(text_column=text_column, document_chars=0)
    if source.format == "json" or source.path.suffix in COMPRESSIONS:
        target = io.BytesIO()
        places = [
            *extract_documents(source.path, source.format, text_column=text_column, document_chars=0, target=target)
        ]
        whole = target.getvalue()
        yield from (whole[offset : offset + num_bytes].decode() for offset, num_bytes in places)
    else:
        layout = formats[source.format]
        yield from (layout.read(source.path, *place) for place in layout.scan(source.path))


def text_rows(
    file: NamedFile, tokenizer: Tokenizer, *, first: int, window: int, stride: int, text_column: str, group: int
) -> tuple[list[ScoredRow], TextSize]:
    """Rows that score every token of a file, and the file's size. `first` stands in front of each document."""
    rows: list[ScoredRow] = []
    num_words = num_bytes = 0
    for text in read_texts(file, text_column=text_column):
        tokens = tokenizer.encode(text)
        rows += sliding_rows(tokens, first=first, window=window, stride=stride, group=group)
        num_words, num_bytes = num_words + len(text.split()), num_bytes + len(text.encode())
    if not rows:
        raise DataError(f"{file.path}: holds no text")
    return rows, TextSize(num_words=num_words, num_bytes=num_bytes)


def last_word_rows(
    file: NamedFile, tokenizer: Tokenizer, *, prefix: tuple[int, ...], window: int, text_column: str, group: int
) -> list[ScoredRow]:
    """A row for each passage, whose targets are the tokens of its last word, with the blank in front of it."""
    rows = []
    for number, passage in enumerate(_passages(file, text_column), start=1):
        context, blank, word = passage.rpartition(" ")
        where = f"{file.path}, passage {number}"
        if not context or not word:
            raise DataError(f"{where}: has no last word after others: {passage[:80]!r}")
        ids = (*prefix, *encode_with_special(context, tokenizer))
        whole = (*prefix, *encode_with_special(context + blank + word, tokenizer))
        row = continuation_row(whole[: len(ids)], whole[len(ids) :], group=group)
        if row.length > window:
            raise DataError(f"{where}: has {row.length:,} tokens before its end, more than --window {window:,}")
        rows.append(row)
    if not rows:
        raise DataError(f"{file.path}: holds no passage")
    return rows


def _passages(file: NamedFile, text_column: str) -> Iterator[str]:
    """Lines of text, or the texts of lines of JSON, without blanks around them."""
    (source,) = find_files([str(file.path)]) if file.path.is_file() else (None,)
    texts = read_texts(file, text_column=text_column)
    for text in texts:
        for passage in text.split("\n") if source is not None and source.format == "text" else [text]:
            if passage.strip():
                yield passage.strip()
