"""Formats of the user's own: a function of `data.formats` that reads a file, and yields its documents.

What it yields is written to a file of the cache, once, and read from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from inspect import getfile, unwrap
from pathlib import Path
from typing import Any, BinaryIO

from parallel3d.data.formats import ConversationLines
from parallel3d.data.sources import OWN_FORMAT
from parallel3d.errors import DataError
from parallel3d.user_code import errors_named, load_object

GROUP = "parallel3d.formats"
"""Entry points of installed packages."""


def load_reader(kind: str) -> Any:
    """The function that a file's format names. Raises ConfigError."""
    return load_object(kind.removeprefix(OWN_FORMAT), field="data.formats", group=GROUP)


def file_of(kind: str) -> Path:
    """The file with the function, after whose change a corpus is read again."""
    return Path(getfile(unwrap(load_reader(kind))))


def extract_own(
    path: Path, kind: str, *, layout: ConversationLines | None, target: BinaryIO
) -> Iterator[tuple[int, int]]:
    """Writes the documents of a file to `target`, with a `layout` as conversations, and yields (offset there, bytes) of
    each. Raises UserCodeError with the line of the user's function, DataError for what is neither."""
    name, position = kind.removeprefix(OWN_FORMAT), 0
    with errors_named(f"data.formats {name}, on {path}"):
        documents = load_reader(kind)(path)
        if not isinstance(documents, Iterable) or isinstance(documents, str | bytes):
            raise DataError(f"data.formats {name}: returned {type(documents).__name__}: it must yield documents")
        for number, document in enumerate(documents, start=1):
            data = _encode(document, layout, f"{path}, document {number} of {name}")
            target.write(data)
            if data:
                yield position, len(data)
            position += len(data)


def _encode(document: object, layout: ConversationLines | None, where: str) -> bytes:
    """A document as it is read later."""
    if layout is not None:
        try:
            line = json.dumps(document).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}: can't be JSON ({error})") from error
        layout.text_of(line, where)
        return line
    if not isinstance(document, str):
        raise DataError(f"{where}: is of type {type(document).__name__}, not text")
    try:
        return document.encode()
    except UnicodeError as error:
        raise DataError(f"{where}: not valid UTF-8 ({error})") from error
