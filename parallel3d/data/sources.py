"""Sources: the files of a corpus, and their order.

A *source* is a file, a folder, a glob, an object of the user's that gives documents, or nothing for the built-in
corpus (the sources of Python's standard library and `pydoc`'s help topics, which every installation has). A source
yields files in the order of their relative names, a saved dataset of Hugging Face in the order of its list. The suffix
of a file determines its format; any other suffix is plain text.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from parallel3d.config.sections.data import SOURCE_GROUP
from parallel3d.data.dataset_folder import dataset_files, is_dataset, validation_files
from parallel3d.data.token_formats import TOKEN_SUFFIXES, index_of
from parallel3d.errors import DataError
from parallel3d.user_code import file_of_object, load_object, names_object

FORMAT_BY_SUFFIX = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".json": "json",
    ".arrow": "arrow",
    ".parquet": "parquet",
    **dict.fromkeys(TOKEN_SUFFIXES, "tokens"),
}
"""The format of each suffix; any other is plain text."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
COMPRESSIBLE = (".txt", ".jsonl", ".json")
FOLDER_SUFFIXES = (
    *(".txt", ".jsonl", ".arrow", ".parquet", ".safetensors"),
    *(suffix + compression for suffix in COMPRESSIBLE for compression in COMPRESSIONS),
)
"""What a folder is searched for, and .bin files with an index. Others must be named: folders have a config.json, a
pytorch_model.bin."""
TRAIN_TOKENS, VALIDATION_TOKENS, TEST_TOKENS = "train.safetensors", "validation.safetensors", "test.safetensors"
"""The files of a prepared folder."""
HELD_OUT_FORMATS = {VALIDATION_TOKENS: "tokens for validation", TEST_TOKENS: "tokens for test"}
"""What all of a file of tokens with such a name is for."""
OWN_FORMAT = "own:"
"""In front of the name of a function of the user's, in place of a format."""
OWN_SOURCE = f"{OWN_FORMAT}source "
"""In front of the name of an object of the user's that gives documents; its file is the one with its code."""
NO_FORMATS: Mapping[str, str] = MappingProxyType({})
OTHER_COMPRESSIONS = (".lz4", ".zip", ".tar", ".tgz", ".7z", ".rar")
# Parts of the standard library that are not read: installed packages, tests, character sets, two large programs,
# and the source of the help topics, which are read as text.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source and the name of its format."""

    path: Path
    format: str
    is_held_out: bool = False
    """All of its text is for evaluation."""


def find_files(sources: Sequence[str], formats: Mapping[str, str] = NO_FORMATS) -> list[SourceFile]:
    """Returns the files of all sources, in the given order and by relative name within each, without repetitions.

    `formats` are the user's own, by the ends of names.
    """
    files = [file for source in sources for file in _files_of(source, formats)] if sources else _built_in_files()
    seen: set[tuple[Path, str]] = set()
    for file in files:
        what = file.path, file.format if file.format.startswith(OWN_SOURCE) else ""
        if what in seen:
            name = file.format.removeprefix(OWN_SOURCE) if what[1] else file.path
            raise DataError(f"{name}: named by two of data.sources. Remove one of them")
        seen.add(what)
    tokens = [file for file in files if file.format.startswith("tokens")]
    if tokens and len(tokens) < len(files):
        text = next(file for file in files if file not in tokens)
        raise DataError(f"data.sources mixes tokens ({tokens[0].path}) with text ({text.path}): use one kind")
    return files


def load_source(name: str) -> Any:
    """The object of the user's that a source names. Raises ConfigError."""
    return load_object(name, field="data.sources", group=SOURCE_GROUP)


def _file_of_source(name: str) -> Path:
    """The file with its code, after whose change its documents are read again."""
    found = load_source(name)
    try:
        return file_of_object(found).resolve()
    except (OSError, TypeError):
        kind = type(found).__name__
        raise DataError(f"data.sources {name} is of type {kind}: name a function or a class of yours") from None


def _files_of(source: str, formats: Mapping[str, str]) -> list[SourceFile]:
    path = Path(source).expanduser()
    held_out: list[Path] = []
    if path.is_file():
        found = [path]
    elif path.is_dir() and is_dataset(path):
        found, held_out = dataset_files(path), validation_files(path)
    elif path.is_dir():
        suffixes = [*FOLDER_SUFFIXES, *formats]
        matching = {file for suffix in suffixes for file in path.rglob(f"*{suffix}")}
        found = _sorted_below(path, matching | {file for file in path.rglob("*.bin") if index_of(file)})
        if not found:
            raise DataError(f"data.sources: the folder {source} has no readable file ({', '.join(suffixes)})")
    else:
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not found and names_object(source, SOURCE_GROUP):
            return [SourceFile(path=_file_of_source(source), format=OWN_SOURCE + source)]
        if not found:
            exists = path.exists() or glob.glob(str(path), recursive=True)
            problem = "is neither a regular file nor a folder" if exists else "doesn't exist, and no file matches it"
            raise DataError(f"data.sources: {source!r} {problem}")
    return [
        SourceFile(path=file.resolve(), format=_format_of(file, formats), is_held_out=file in held_out)
        for file in [*found, *held_out]
    ]


def _format_of(file: Path, formats: Mapping[str, str]) -> str:
    """A compressed file has the format of its text; the longest end of a name that the user gives a format decides."""
    own = [end for end in formats if file.name.endswith(end)]
    if own:
        return OWN_FORMAT + formats[max(own, key=len)]
    if file.suffix in OTHER_COMPRESSIONS:
        readable = ", ".join(COMPRESSIONS)
        raise DataError(f"data.sources: {file.name} is packed, and only {readable} are read: unpack it first")
    if file.suffix in COMPRESSIONS:
        found = FORMAT_BY_SUFFIX.get(Path(file.stem).suffix, "text")
        if found not in ("text", "jsonl", "json"):
            raise DataError(f"data.sources: {file.name}: compressed {found} is not read: decompress it first")
        return found
    return HELD_OUT_FORMATS.get(file.name) or FORMAT_BY_SUFFIX.get(file.suffix, "text")


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


def _sorted_below(folder: Path, files: Collection[Path]) -> list[Path]:
    return sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(folder).as_posix())
