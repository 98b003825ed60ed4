"""Sources: which files a corpus is made of, in which order.

A *source* is what the user names: a file, a folder, a glob, or nothing for the built-in corpus (the Python standard
library's sources and `pydoc`'s help topics, which every installation has). A source yields files in the order of their
relative names; the suffix of a file says its format, and other names are plain text.
"""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel3d.errors import DataError

FORMAT_BY_SUFFIX = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".arrow": "arrow",
    ".parquet": "parquet",
    ".safetensors": "tokens",
}
"""What a folder is searched for, and how each kind of file is read."""
TRAIN_TOKENS, VALIDATION_TOKENS = "train.safetensors", "validation.safetensors"
"""The files of a prepared folder. A file of tokens with the second name is for evaluation, all of it."""
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz")
# Of the standard library: installed packages, tests, tables of character sets, two large programs, and the source of
# the help topics, which are read as text.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


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
    tokens = [file for file in files if file.format.startswith("tokens")]
    if tokens and len(tokens) < len(files):
        text = next(file for file in files if file not in tokens)
        raise DataError(f"data.sources mixes tokens ({tokens[0].path}) with text ({text.path}): name one kind")
    return files


def _files_of(source: str) -> list[SourceFile]:
    path = Path(source).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = _sorted_below(path, [file for suffix in FORMAT_BY_SUFFIX for file in path.rglob(f"*{suffix}")])
        if not found:
            suffixes = ", ".join(FORMAT_BY_SUFFIX)
            raise DataError(f"data.sources: the folder {source} has no file that is read ({suffixes})")
    else:
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not found:
            raise DataError(f"data.sources: there is no file, folder or match of the pattern {source!r}")
    return [SourceFile(path=file.resolve(), format=_format_of(file.name, file.suffix)) for file in found]


def _format_of(name: str, suffix: str) -> str:
    if suffix in COMPRESSED_SUFFIXES:
        raise DataError(f"data.sources: {name} is packed: unpack it first")
    return "tokens for validation" if name == VALIDATION_TOKENS else FORMAT_BY_SUFFIX.get(suffix, "text")


def _built_in_files() -> list[SourceFile]:
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [file for file in library.rglob("*.py") if EXCLUDED_FOLDERS.isdisjoint(file.relative_to(library).parts)]
    files = [SourceFile(path=file, format="text") for file in _sorted_below(library, sources)]
    topics = library / "pydoc_data" / "topics.py"
    if topics.is_file():
        files.append(SourceFile(path=topics, format="help_topics"))
    if not files:
        raise DataError(f"the built-in corpus is Python's library, but {library} has no sources: set data.sources")
    return files


def _sorted_below(folder: Path, files: list[Path]) -> list[Path]:
    return sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(folder).as_posix())
