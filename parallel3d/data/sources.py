"""Sources: the files of a corpus, and their order.

A *source* is a file, a folder, a glob, or nothing for the built-in corpus (the sources of Python's standard library and
`pydoc`'s help topics, which every installation has). A source yields files in the order of their relative names. The
suffix of a file determines its format; any other suffix is plain text.
"""

from __future__ import annotations

import glob
import os
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
"""The suffixes that a folder is searched for, and the format of each."""
TRAIN_TOKENS, VALIDATION_TOKENS = "train.safetensors", "validation.safetensors"
"""The files of a prepared folder. All of a file of tokens with the second name is for evaluation."""
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz")
# Parts of the standard library that are not read: installed packages, tests, character sets, two large programs,
# and the source of the help topics, which are read as text.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source and the name of its format."""

    path: Path
    format: str


def find_files(sources: Sequence[str]) -> list[SourceFile]:
    """Returns the files of all sources, in the given order and by relative name within each, without repetitions."""
    files = [file for source in sources for file in _files_of(source)] if sources else _built_in_files()
    seen: set[Path] = set()
    for file in files:
        if file.path in seen:
            raise DataError(f"{file.path}: named by two of data.sources. Remove one of them")
        seen.add(file.path)
    tokens = [file for file in files if file.format.startswith("tokens")]
    if tokens and len(tokens) < len(files):
        text = next(file for file in files if file not in tokens)
        raise DataError(f"data.sources mixes tokens ({tokens[0].path}) with text ({text.path}): use one kind")
    return files


def _files_of(source: str) -> list[SourceFile]:
    path = Path(source).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = _sorted_below(path, [file for suffix in FORMAT_BY_SUFFIX for file in path.rglob(f"*{suffix}")])
        if not found:
            suffixes = ", ".join(FORMAT_BY_SUFFIX)
            raise DataError(f"data.sources: the folder {source} has no readable file ({suffixes})")
    else:
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not found:
            exists = path.exists() or glob.glob(str(path), recursive=True)
            problem = "is neither a regular file nor a folder" if exists else "doesn't exist, and no file matches it"
            raise DataError(f"data.sources: {source!r} {problem}")
    return [SourceFile(path=file.resolve(), format=_format_of(file.name, file.suffix)) for file in found]


def _format_of(name: str, suffix: str) -> str:
    if suffix in COMPRESSED_SUFFIXES:
        raise DataError(f"data.sources: {name} is compressed: decompress it first")
    return "tokens for validation" if name == VALIDATION_TOKENS else FORMAT_BY_SUFFIX.get(suffix, "text")


def _built_in_files() -> list[SourceFile]:
    library = Path(sysconfig.get_paths()["stdlib"])
    sources: list[Path] = []
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]  # not entered: most files are there
        sources += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [SourceFile(path=file, format="text") for file in _sorted_below(library, sources)]
    topics = library / "pydoc_data" / "topics.py"
    if topics.is_file():
        files.append(SourceFile(path=topics, format="help_topics"))
    if not files:
        raise DataError(
            f"the built-in corpus is Python's standard library, but {library} has no sources: set data.sources"
        )
    return files


def _sorted_below(folder: Path, files: list[Path]) -> list[Path]:
    return sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(folder).as_posix())
