"""What determines a corpus: its files, and the settings by which they are split and tokenised."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from parallel3d.config.sections.data import TokenizerConfig
from parallel3d.data.own_format import file_of
from parallel3d.data.sources import OWN_FORMAT, SourceFile
from parallel3d.data.token_formats import index_of
from parallel3d.data.tokenizer_files import files_of
from parallel3d.errors import DataError

FORMAT_VERSION = 2
MIN_DOCUMENT_CHARS, MAX_DOCUMENT_CHARS = 256, 65_536
DOCUMENTS_PER_LANE = 8
LIBRARIES = ("sentencepiece", "tokenizers", "pyarrow", "zstandard")


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    """All inputs of a corpus."""

    files: Sequence[SourceFile]
    text_column: str
    document_chars: int
    validation_fraction: float
    test_fraction: float
    tokenizer: TokenizerConfig
    chat: Mapping[str, str] | None = None
    """The template of conversations; None: the files are text."""
    needs_eos: bool = True
    """Files of tokens must have an EOS after each document. A slice has no documents."""

    @property
    def is_tokens(self) -> bool:
        """Whether the files are tokenised already."""
        return self.files[0].format.startswith("tokens")

    @property
    def held_out_files(self) -> set[int]:
        """Numbers of the files of text whose documents are all for evaluation."""
        return {number for number, file in enumerate(self.files) if file.is_held_out}

    def cache_key(self) -> str:
        """Name of the corpus in the cache; the same on one machine until a file or a version changes."""
        path = self.tokenizer.path and Path(self.tokenizer.path).expanduser()
        parts: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "files": [(_stat(file.path), file.format) for file in self.files],
            "text_column": self.text_column,
            "document_chars": self.document_chars,
            "validation_fraction": self.validation_fraction,
            "tokenizer": [self.tokenizer.model_dump(), path and [*map(_stat, _tokenizer_files(path))]],
            "versions": [sys.version, *map(_version, LIBRARIES)],
        }
        if indexes := [_stat(index) for file in self.files if (index := index_of(file.path))]:
            parts["indexes"] = indexes
        if own := sorted({file.format for file in self.files if file.format.startswith(OWN_FORMAT)}):
            parts["own_formats"] = [_stat(file_of(kind)) for kind in own]
        if held_out := self.held_out_files:
            parts["held_out"] = sorted(held_out)
        if self.chat is not None:
            parts["chat"] = self.chat
        if self.test_fraction:
            parts["test_fraction"] = self.test_fraction
        if not self.needs_eos:
            parts["needs_eos"] = False
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def choose_document_chars(total_bytes: int, num_lanes: int, validation_fraction: float) -> int:
    """Returns the length of documents of plain text: a power of two, so that small changes of the corpus don't move it.

    Every lane gets several documents, and one for validation as long as that leaves documents of a few thousand
    characters.
    """
    for_training = total_bytes // (num_lanes * DOCUMENTS_PER_LANE)
    for_validation = int(total_bytes * validation_fraction / num_lanes) or for_training
    chars = min(for_training, max(for_validation, 4096))
    return 1 << (min(max(chars, MIN_DOCUMENT_CHARS), MAX_DOCUMENT_CHARS).bit_length() - 1)


def _tokenizer_files(path: Path) -> list[Path]:
    return files_of(path) if path.exists() else [path]


def _stat(path: Path) -> tuple[str, int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: no such file") from error
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "none"
