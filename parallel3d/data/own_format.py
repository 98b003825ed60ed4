"""Documents of the user's own: a function of `data.formats` that reads a file, or an object in `data.sources`.

What they give is written to a file of the cache, once, and read from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from parallel3d.data.formats import ConversationLines
from parallel3d.data.sources import OWN_FORMAT, OWN_SOURCE, load_source
from parallel3d.errors import DataError
from parallel3d.user_code import check_call, errors_named, file_of_object, load_object

GROUP = "parallel3d.formats"
"""Entry points of installed packages."""


def load_reader(kind: str) -> Any:
    """The function that a file's format names. Raises ConfigError."""
    return load_object(kind.removeprefix(OWN_FORMAT), field="data.formats", group=GROUP)


def file_of(kind: str) -> Path:
    """The file with the function or object, after whose change a corpus is read again."""
    found = load_source(kind.removeprefix(OWN_SOURCE)) if kind.startswith(OWN_SOURCE) else load_reader(kind)
    return file_of_object(found)


def extract_own(
    path: Path, kind: str, *, layout: ConversationLines | None, target: BinaryIO
) -> Iterator[tuple[int, int]]:
    """Writes the documents of a file to `target`, with a `layout` as conversations, and yields (offset there, bytes) of
    each. Raises UserCodeError with the line of the user's function, DataError for what is neither."""
    is_source, position = kind.startswith(OWN_SOURCE), 0
    name = kind.removeprefix(OWN_SOURCE if is_source else OWN_FORMAT)
    field, where, place = ("data.sources", "", "") if is_source else ("data.formats", f", on {path}", f"{path}, ")
    with errors_named(f"{field} {name}{where}"):
        given = load_source(name) if is_source else _call(load_reader(kind), path, what=f"{field} {name}")
        documents = _call(given, what=f"{field} {name}") if is_source and callable(given) else given
        is_list = hasattr(documents, "__len__") and hasattr(documents, "__getitem__")
        if isinstance(documents, str | bytes) or not (isinstance(documents, Iterable) or is_list):
            verb = "is" if documents is given and is_source else "returned"
            raise DataError(f"{field} {name}: {verb} {type(documents).__name__}: it must yield documents")
        is_indexed = is_list and not isinstance(documents, Iterable)
        each = (documents[index] for index in range(len(documents))) if is_indexed else documents
        for number, document in enumerate(each, start=1):
            data = _encode(document, layout, f"{place}document {number} of {name}")
            target.write(data)
            if data:
                yield position, len(data)
            position += len(data)


def _call(function: Any, *arguments: Any, what: str) -> Any:
    check_call(function, *arguments, what=what)
    return function(*arguments)


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
