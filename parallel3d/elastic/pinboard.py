"""The key-value store that the coordinator serves to its workers: who asks for what is not there yet waits for it.

Groups meet in it (elastic/store.py). Keys of a membership epoch begin with its number, and are forgotten with it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from parallel3d.elastic.switchboard import Peer

OPS = ("set", "get", "get_all", "check", "add")
"""The frames that are for it."""


class Pinboard:
    """Values by key, some of them known from the start; `send` answers a peer."""

    def __init__(self, values: Mapping[str, bytes], send: Callable[[Peer, dict[str, Any], bytes], None]):
        self._send = send
        self._values = dict(values)
        self._waiting: defaultdict[str, list[tuple[Peer, int]]] = defaultdict(list)
        self._waiting_for_all: defaultdict[str, list[tuple[Peer, int, list[str]]]] = defaultdict(list)

    def heed(self, peer: Peer, header: dict[str, Any], payload: bytes) -> None:
        """A worker's frame, one of `OPS`."""
        match header["op"]:
            case "set":
                self._set(header["key"], payload)
            case "get":
                self._waiting[header["key"]].append((peer, header["id"]))
                self._answer_waiting(header["key"])
            case "get_all":
                self._answer_all(peer, header["id"], header["keys"])
            case "check":
                found = all(key in self._values for key in header["keys"])
                self._send(peer, {"op": "answer", "id": header["id"], "found": found}, b"")
            case "add":
                value = int(self._values.get(header["key"], b"0")) + int(header["amount"])
                self._set(header["key"], str(value).encode())
                self._send(peer, {"op": "answer", "id": header["id"], "value": value}, b"")

    def forget_epochs_before(self, epoch: int) -> None:
        for table in (self._values, self._waiting, self._waiting_for_all):
            for key in [key for key in table if epoch_of(key) < epoch]:
                del table[key]

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._answer_waiting(key)

    def _answer_waiting(self, key: str) -> None:
        if key in self._values:
            for peer, number in self._waiting.pop(key, []):
                self._send(peer, {"op": "answer", "id": number}, self._values[key])
            for peer, number, keys in self._waiting_for_all.pop(key, []):
                self._answer_all(peer, number, keys)

    def _answer_all(self, peer: Peer, number: int, keys: list[str]) -> None:
        """At once, or when the first of the missing keys is set, and so on."""
        missing = next((key for key in keys if key not in self._values), None)
        if missing is not None:
            self._waiting_for_all[missing].append((peer, number, keys))
            return
        values = [self._values[key] for key in keys]
        header = {"op": "answer", "id": number, "sizes": [len(value) for value in values]}
        self._send(peer, header, b"".join(values))


def epoch_of(key: str) -> float:
    """The membership epoch to which a key belongs; infinity for those of the whole run."""
    match = re.match(r"epoch(\d+)/", key)
    return int(match[1]) if match else float("inf")
