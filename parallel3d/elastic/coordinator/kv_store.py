"""The key-value store that the coordinator serves to its workers. A get waits until its key is set.

Process groups rendezvous in it (worker/torch_store.py). Keys of a membership generation begin with `generation<n>/` and
are dropped when a later one is committed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.elastic.coordinator.connection import Connection

OPS = ("set", "get", "get_all", "check", "add")
"""The workers' frames that it handles."""


Column = list[int] | None
"""[n, number]: of values that end in a table of n words, only the word of this number; None: whole values."""
WORD_BYTES = 8


@dataclass(kw_only=True)
class _Request:
    """A worker that waits for the values of keys."""

    connection: Connection
    number: int
    keys: list[str]
    column: Column
    num_found: int = 0
    """Of the keys, from the first one on."""


class KeyValueStore:
    """A key-value store with initial `values`; `send` answers a connection."""

    def __init__(self, values: Mapping[str, bytes], send: Callable[[Connection, dict[str, Any], bytes], None]):
        self._send = send
        self._values = dict(values)
        self._waiting: dict[str, list[_Request]] = {}
        """Requests, each by its first key that is not set."""
        self._generations: defaultdict[float, set[str]] = defaultdict(set)
        """The keys of each generation, set or waited for."""

    def handle(self, connection: Connection, header: dict[str, Any], payload: bytes) -> None:
        """Handles a worker's frame, one of `OPS`."""
        match header["op"]:
            case "set":
                self._set(header["key"], payload)
            case "get":
                self._respond(_Request(connection=connection, number=header["id"], keys=[header["key"]], column=None))
            case "get_all":
                keys, column = header["keys"], header.get("column")
                self._respond(_Request(connection=connection, number=header["id"], keys=keys, column=column))
            case "check":
                found = all(key in self._values for key in header["keys"])
                self._send(connection, {"op": "response", "id": header["id"], "found": found}, b"")
            case "add":
                value = int(self._values.get(header["key"], b"0")) + int(header["amount"])
                self._set(header["key"], str(value).encode())
                self._send(connection, {"op": "response", "id": header["id"], "value": value}, b"")

    def drop_generations_before(self, generation: int) -> None:
        for old in [each for each in self._generations if each < generation]:
            for key in self._generations.pop(old):
                self._values.pop(key, None)
                self._waiting.pop(key, None)

    def _set(self, key: str, value: bytes) -> None:
        self._generations[generation_of(key)].add(key)
        self._values[key] = value
        for request in self._waiting.pop(key, ()):
            self._respond(request)

    def _respond(self, request: _Request) -> None:
        """Answers now, or goes on when the first missing key is set."""
        keys = request.keys
        while request.num_found < len(keys) and keys[request.num_found] in self._values:
            request.num_found += 1
        if request.num_found < len(keys):
            missing = keys[request.num_found]
            self._generations[generation_of(missing)].add(missing)
            self._waiting.setdefault(missing, []).append(request)
            return
        values = [cut_column(self._values[key], request.column) for key in keys]
        header = {"op": "response", "id": request.number, "sizes": [len(value) for value in values]}
        self._send(request.connection, header, b"".join(values))


def generation_of(key: str) -> float:
    """Returns the membership generation that a key belongs to; infinity for keys of the whole run."""
    match = re.match(r"generation(\d+)/", key)
    return int(match[1]) if match else float("inf")


def cut_column(value: bytes, column: Column) -> bytes:
    """What stands before the table, and one word of it."""
    if column is None:
        return value
    start = max(0, len(value) - column[0] * WORD_BYTES)
    word = start + column[1] * WORD_BYTES
    return value[:start] + value[word : word + WORD_BYTES]
