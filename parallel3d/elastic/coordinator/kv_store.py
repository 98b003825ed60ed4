"""The key-value store that the coordinator serves to its workers. A get waits until its key is set.

Process groups rendezvous in it (worker/torch_store.py). Keys of a membership generation begin with `generation<n>/` and
are dropped when a later one is committed. Two operations are for many workers that all need to know about all, at costs
that grow with their number, and not with its square:

    gather    the values that a group's ranks have set: one answer for all, once all are there
    compare   whether workers say the same of numbered things: one answer for all, once all have spoken

Such an answer has the key for its number, so that it is encoded once, and goes to a host once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from parallel3d.elastic.coordinator.connection import Connection
from parallel3d.elastic.gathered_values import encode_values
from parallel3d.errors import ProtocolError

OPS = ("set", "get", "get_all", "gather", "check", "add", "compare")
"""The workers' frames that it handles."""


@dataclass(kw_only=True)
class _Request:
    """A worker that waits for the values of keys."""

    connection: Connection
    number: int
    keys: list[str]
    num_found: int = 0
    """Of the keys, from the first one on."""


@dataclass(kw_only=True)
class _Gathering:
    """The values of a group's ranks, under keys that end in their numbers; each is set once."""

    base: str
    size: int
    num_found: int = 0
    """Of the values, from the first one on."""
    answer: bytes | None = None
    """Once all are found."""
    waiting: list[Connection] = field(default_factory=list)


@dataclass(kw_only=True)
class _Comparison:
    """What `size` workers say of numbered things."""

    size: int
    workers: dict[int | None, Connection] = field(default_factory=dict)
    """Those that have spoken, by rank: one that says it again counts once."""
    states: dict[int, str] = field(default_factory=dict)
    """What the first one has said of each thing."""
    differing: int = 0
    """Bit n: another one has said something else of thing n."""

    def add(self, connection: Connection, numbers: Iterable[int], states: Iterable[str]) -> None:
        self.workers[connection.rank] = connection
        for number, state in zip(numbers, states, strict=True):
            if self.states.setdefault(number, state) != state:
                self.differing |= 1 << number

    @property
    def answer(self) -> bytes:
        return self.differing.to_bytes(-(-self.differing.bit_length() // 8), "little")


class KeyValueStore:
    """A key-value store with initial `values`; `send` answers connections, all of them in the same words."""

    def __init__(
        self, values: Mapping[str, bytes], send: Callable[[Iterable[Connection], dict[str, Any], bytes], None]
    ):
        self._send = send
        self._values = dict(values)
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        """How to go on with requests, each by its first key that is not set."""
        self._gatherings: dict[str, _Gathering] = {}
        self._comparisons: dict[str, _Comparison] = {}
        """Those that are not over yet."""
        self._generations: defaultdict[float, set[str]] = defaultdict(set)
        """The keys of each generation, set or waited for."""

    def handle(self, connection: Connection, header: dict[str, Any], payload: bytes) -> None:
        """Handles a worker's frame, one of `OPS`. Raises ProtocolError if it does not fit what others have said."""
        match header["op"]:
            case "set":
                self._set(header["key"], payload)
            case "get":
                self._respond(_Request(connection=connection, number=header["id"], keys=[header["key"]]))
            case "get_all":
                self._respond(_Request(connection=connection, number=header["id"], keys=header["keys"]))
            case "gather":
                self._gather(connection, header)
            case "check":
                found = all(key in self._values for key in header["keys"])
                self._send([connection], {"op": "response", "id": header["id"], "found": found}, b"")
            case "add":
                value = int(self._values.get(header["key"], b"0")) + int(header["amount"])
                self._set(header["key"], str(value).encode())
                self._send([connection], {"op": "response", "id": header["id"], "value": value}, b"")
            case "compare":
                self._compare(connection, header)

    def drop_generations_before(self, generation: int) -> None:
        for old in [each for each in self._generations if each < generation]:
            for key in self._generations.pop(old):
                for table in (self._values, self._waiting, self._gatherings, self._comparisons):
                    table.pop(key, None)

    def _set(self, key: str, value: bytes) -> None:
        self._note(key)
        self._values[key] = value
        for go_on in self._waiting.pop(key, ()):
            go_on()

    def _respond(self, request: _Request) -> None:
        """Answers now, or goes on when the first missing key is set."""
        keys = request.keys
        while request.num_found < len(keys) and keys[request.num_found] in self._values:
            request.num_found += 1
        if request.num_found < len(keys):
            self._wait_for(keys[request.num_found], partial(self._respond, request))
            return
        values = [self._values[key] for key in keys]
        header = {"op": "response", "id": request.number, "sizes": [len(value) for value in values]}
        self._send([request.connection], header, b"".join(values))

    def _gather(self, connection: Connection, header: dict[str, Any]) -> None:
        base, size = header["key"], header["size"]
        if base not in self._gatherings:
            self._note(base)
            self._gatherings[base] = _Gathering(base=base, size=size)
            self._look(self._gatherings[base])
        gathering = self._gatherings[base]
        if size != gathering.size:
            raise ProtocolError(f"a gather of {size} values at {base}, which has {gathering.size}")
        gathering.waiting.append(connection)
        self._answer(gathering)

    def _look(self, gathering: _Gathering) -> None:
        """Looks for the values that are missing, and answers with the last one."""
        while gathering.num_found < gathering.size:
            key = f"{gathering.base}/{gathering.num_found}"
            if key not in self._values:
                self._wait_for(key, partial(self._look, gathering))
                return
            gathering.num_found += 1
        gathering.answer = encode_values([self._values[f"{gathering.base}/{n}"] for n in range(gathering.size)])
        self._answer(gathering)

    def _answer(self, gathering: _Gathering) -> None:
        """Answers those that wait if all is there."""
        if gathering.answer is not None and gathering.waiting:
            self._send(gathering.waiting, {"op": "response", "id": gathering.base}, gathering.answer)
            gathering.waiting = []

    def _compare(self, connection: Connection, header: dict[str, Any]) -> None:
        """Notes what a worker says, and answers all with the last one. Then the key is forgotten."""
        key, size, numbers, states = (header[name] for name in ("key", "size", "numbers", "states"))
        if key not in self._comparisons:
            self._note(key)
            self._comparisons[key] = _Comparison(size=size)
        comparison = self._comparisons[key]
        if size != comparison.size or len(numbers) != len(states):
            raise ProtocolError(f"{len(states)} states of {len(numbers)} things, compared by {size} at {key}")
        comparison.add(connection, numbers, states)
        if len(comparison.workers) == size:
            del self._comparisons[key]
            self._send(comparison.workers.values(), {"op": "response", "id": key}, comparison.answer)

    def _wait_for(self, key: str, go_on: Callable[[], None]) -> None:
        self._note(key)
        self._waiting.setdefault(key, []).append(go_on)

    def _note(self, key: str) -> None:
        """Notes a key for the end of its generation."""
        self._generations[generation_of(key)].add(key)


def generation_of(key: str) -> float:
    """Returns the membership generation that a key belongs to; infinity for keys of the whole run."""
    match = re.match(r"generation(\d+)/", key)
    return int(match[1]) if match else float("inf")
