"""Documents of text files: found, cut and checked once, then read at random without loading the rest.

A *source* is what the user names: a file, a folder, a glob, or nothing for the built-in corpus (the Python standard
library's sources and `pydoc`'s help topics, which every installation has). A source yields files in the order of their
relative names; a *format* says where the documents of a file lie, (offset, number of bytes) each, and reads one of
them. Another kind of file is another format.
"""

from __future__ import annotations

import glob
import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from parallel3d.errors import DataError

FOLDER_SUFFIXES = (".txt", ".jsonl")
# Of the standard library: installed packages, tests, tables of character sets, two large programs, and the source of
# the help topics, which are read as text.
NOT_BUILT_IN = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


class Format(Protocol):
    """How documents lie in one kind of file."""

    def scan(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yields (offset, number of bytes) of each document that is not empty; raises DataError where one is bad."""
        ...

    def read(self, path: Path, offset: int, num_bytes: int) -> str:
        """Returns the document at `offset`, in the format's own unit."""
        ...


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source and the name of its format."""

    path: Path
    format: str


def find_files(sources: Sequence[str]) -> list[SourceFile]:
    """Returns the files of all sources, in the order given and by relative name within each; none twice."""
    files = [file for source in sources for file in _files_of(source)] if sources else _built_in_files()
    seen: set[Path] = set()
    for file in files:
        if file.path in seen:
            raise DataError(f"{file.path}: given by two of data.sources; it would be read twice. Drop one of them")
        seen.add(file.path)
    return files


def build_formats(*, text_column: str, document_chars: int) -> Mapping[str, Format]:
    """Returns each format under its name."""
    return {
        "text": PlainText(document_chars=document_chars),
        "jsonl": JsonLines(text_column=text_column),
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
class JsonLines:
    """One JSON object a line, its text under `text_column`; a line is a document."""

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
    formats: Mapping[str, Format]
    places: np.ndarray
    """int64 (documents, 3): number of the file, offset, bytes."""

    @staticmethod
    def scan(files: Sequence[SourceFile], formats: Mapping[str, Format]) -> DocumentSet:
        """Returns all documents of `files`, in order, having read and checked every byte."""
        rows = [
            (number, offset, num_bytes)
            for number, file in enumerate(files)
            for offset, num_bytes in formats[file.format].scan(file.path)
        ]
        return DocumentSet(files=files, formats=formats, places=np.array(rows, np.int64).reshape(-1, 3))

    def __len__(self) -> int:
        return len(self.places)

    @property
    def num_bytes(self) -> np.ndarray:
        """int64 (documents,): the size of each."""
        return self.places[:, 2]

    def read(self, index: int) -> str:
        """Returns the text of document `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number, offset, num_bytes = self.places[index].tolist()
        file = self.files[number]
        return self.formats[file.format].read(file.path, offset, num_bytes)

    def select(self, indices: np.ndarray) -> DocumentSet:
        """Returns the documents `indices`, in that order."""
        return DocumentSet(files=self.files, formats=self.formats, places=self.places[indices])


def _files_of(source: str) -> list[SourceFile]:
    path = Path(source).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = _sorted_below(path, [file for suffix in FOLDER_SUFFIXES for file in path.rglob(f"*{suffix}")])
        if not found:
            raise DataError(f"data.sources: the folder {source} has no {' or '.join(FOLDER_SUFFIXES)} file")
    else:
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not found:
            raise DataError(f"data.sources: there is no file, folder or match of the pattern {source!r}")
    return [SourceFile(path=file.resolve(), format="jsonl" if file.suffix == ".jsonl" else "text") for file in found]


def _built_in_files() -> list[SourceFile]:
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [file for file in library.rglob("*.py") if NOT_BUILT_IN.isdisjoint(file.relative_to(library).parts)]
    files = [SourceFile(path=file, format="text") for file in _sorted_below(library, sources)]
    topics = library / "pydoc_data" / "topics.py"
    if topics.is_file():
        files.append(SourceFile(path=topics, format="help_topics"))
    if not files:
        raise DataError(f"the built-in corpus is Python's library, but {library} has no sources: set data.sources")
    return files


def _sorted_below(folder: Path, files: list[Path]) -> list[Path]:
    return sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(folder).as_posix())


def _line_sizes(path: Path) -> Iterator[tuple[int, int]]:
    """Yields (bytes, characters) of each line."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            yield len(line), len(_decode(line, path, offset))
            offset += len(line)


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
