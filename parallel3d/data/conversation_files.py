"""Conversations in files that have no random access by lines: compressed JSON, JSON in arrays, Parquet and Arrow.

They are written to a file of the cache as lines of JSON, from which they are read like those of a .jsonl file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from parallel3d.data.columns import iterate_rows
from parallel3d.data.compressed import JsonValues, opened
from parallel3d.data.formats import ConversationLines
from parallel3d.errors import DataError

READABLE = ("jsonl", "json", "arrow", "parquet")
"""Formats of sources; the first also compressed, as the second."""
MESSAGES, SHAREGPT, PROMPT, COMPLETION = COLUMNS = ("messages", "conversations", "prompt", "completion")
"""Those of a table, which may have a null for a conversation that is in the others."""


def extract_conversations(
    path: Path, kind: str, *, layout: ConversationLines, target: BinaryIO
) -> Iterator[tuple[int, int]]:
    """Writes the conversations of a file to `target`, a line each, and yields (offset there, bytes) of each. Raises
    DataError with the place of a malformed one."""
    position = 0
    for where, line in _lines(path, kind, layout):
        layout.text_of(line, where)
        target.write(line)
        yield position, len(line)
        position += len(line)


def _lines(path: Path, kind: str, layout: ConversationLines) -> Iterator[tuple[str, bytes]]:
    """(where it stands, JSON) of each conversation."""
    if kind in ("arrow", "parquet"):
        for row, record in enumerate(iterate_rows(path, kind, lambda names: _columns(path, names))):
            yield (
                f"{path}, row {row} (from 0)",
                _dump({name: each for name, each in record.items() if each is not None}),
            )
        return
    with opened(path) as file:
        if kind == "jsonl":
            for number, _, line in layout.lines(file, path):
                yield f"{path}:{number}", line
        else:
            for number, record in enumerate(JsonValues(file, path), start=1):
                yield f"{path}: object {number}", _dump(record)


def _dump(record: object) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _columns(path: Path, names: list[str]) -> tuple[str, ...]:
    """The columns that hold conversations."""
    found = tuple(name for name in COLUMNS if names.count(name) == 1)
    if {MESSAGES, SHAREGPT} & {*found} or {PROMPT, COMPLETION} <= {*found}:
        return found
    listed = ", ".join(map(repr, names))
    raise DataError(f"{path}: no column 'messages' or 'conversations', nor 'prompt' and 'completion'; it has {listed}")
