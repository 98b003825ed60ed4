"""The key-value store that the coordinator serves to its workers. A get waits until its key is set.

Process groups rendezvous in it (worker/torch_store.py). Keys of a membership generation begin with `generation<n>/` and
are dropped when a later one is committed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from parallel3d.elastic.coordinator.connection import Connection

OPS = ("set", "get", "get_all", "check", "add")
"""The workers' frames that it handles."""


Column = list[int] | None
"""[n, number]: of values that end in a table of n words, only the word of this number; None: whole values."""
WORD_BYTES = 8


class KeyValueStore:
    """A key-value store with initial `values`; `send` answers a connection."""

    def __init__(self, values: Mapping[str, bytes], send: Callable[[Connection, dict[str, Any], bytes], None]):
        self._send = send
        self._values = dict(values)
        self._waiting: defaultdict[str, list[tuple[Connection, int]]] = defaultdict(list)
        self._waiting_for_all: defaultdict[str, list[tuple[Connection, int, list[str], Column]]] = defaultdict(list)

    def handle(self, connection: Connection, header: dict[str, Any], payload: bytes) -> None:
        """Handles a worker's frame, one of `OPS`."""
        match header["op"]:
            case "set":
                self._set(header["key"], payload)
            case "get":
                self._waiting[header["key"]].append((connection, header["id"]))
                self._respond_to_waiting(header["key"])
            case "get_all":
                self._respond_with_all(connection, header["id"], header["keys"], header.get("column"))
            case "check":
                found = all(key in self._values for key in header["keys"])
                self._send(connection, {"op": "response", "id": header["id"], "found": found}, b"")
            case "add":
                value = int(self._values.get(header["key"], b"0")) + int(header["amount"])
                self._set(header["key"], str(value).encode())
                self._send(connection, {"op": "response", "id": header["id"], "value": value}, b"")

    def drop_generations_before(self, generation: int) -> None:
        for table in (self._values, self._waiting, self._waiting_for_all):
            for key in [key for key in table if generation_of(key) < generation]:
                del table[key]

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._respond_to_waiting(key)

    def _respond_to_waiting(self, key: str) -> None:
        if key in self._values:
            for connection, number in self._waiting.pop(key, []):
                self._send(connection, {"op": "response", "id": number}, self._values[key])
            for connection, number, keys, column in self._waiting_for_all.pop(key, []):
                self._respond_with_all(connection, number, keys, column)

    def _respond_with_all(self, connection: Connection, number: int, keys: list[str], column: Column) -> None:
        """Answers now, or tries again when the first missing key is set."""
        missing = next((key for key in keys if key not in self._values), None)
        if missing is not None:
            self._waiting_for_all[missing].append((connection, number, keys, column))
            return
        values = [cut_column(self._values[key], column) for key in keys]
        header = {"op": "response", "id": number, "sizes": [len(value) for value in values]}
        self._send(connection, header, b"".join(values))


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
