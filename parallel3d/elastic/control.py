"""The control channel: how a worker talks to the run's coordinator.

Frames over TCP, no torch: a torch TCPStore ignores its timeouts when its host hangs, dies with the rank that hosts it,
and cannot push news. One frame:

    header length (4 bytes) | payload length (4 bytes) | header: a JSON object | payload: bytes

A worker's frames:  hello, set, get, check, add, publish, error, finish
A guardian's:       hello, ended, stop
The coordinator's:  answer, stop, abort, over (to guardians), bye
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from parallel3d.comm.abort import POLL_S, AbortToken
from parallel3d.errors import LaunchError, ProtocolError

Address = tuple[str, int]

MAX_HEADER_BYTES = 16 * 2**20
MAX_PAYLOAD_BYTES = 2**30
CHUNK_BYTES = 2**16
RETRY_S = 0.1
GOODBYE_S = 5.0

_LENGTHS = struct.Struct(">II")


def encode_frame(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """The bytes of one frame; raises TypeError for a header that JSON can't carry."""
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


class FrameReader:
    """Cuts a stream of bytes, however it is chunked, into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yields (header, payload) of each frame that `data` completes; raises ProtocolError for what is none."""
        self._bytes += data
        while len(self._bytes) >= _LENGTHS.size:
            header_bytes, payload_bytes = _LENGTHS.unpack_from(self._bytes)
            if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                raise ProtocolError(f"not a control frame: lengths {header_bytes} and {payload_bytes}")
            start, end = _LENGTHS.size + header_bytes, _LENGTHS.size + header_bytes + payload_bytes
            if len(self._bytes) < end:
                return
            try:
                header = json.loads(self._bytes[_LENGTHS.size : start])
            except ValueError as error:
                raise ProtocolError(f"not a control frame: {error}") from None
            if not isinstance(header, dict):
                raise ProtocolError(f"not a control frame: header {header!r}")
            payload = bytes(self._bytes[start:end])
            del self._bytes[:end]
            yield header, payload


def open_connection(address: Address, hello: dict[str, Any], *, timeout_s: float) -> socket.socket:
    """A connection to the coordinator that has said `hello`; tries again until `timeout_s`, then LaunchError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(RETRY_S, deadline - time.monotonic()))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(encode_frame(hello))
            connection.settimeout(None)
            return connection
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline:
                host, port = address
                raise LaunchError(
                    f"could not reach the run's coordinator at {host}:{port} within {timeout_s:g} s ({error})"
                ) from None
            time.sleep(RETRY_S)


@dataclass
class _Answer:
    arrived: threading.Event = field(default_factory=threading.Event)
    header: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


class Control:
    """A worker's end of the channel. All methods may be called from any thread; only the store's calls wait."""

    def __init__(self, connection: socket.socket, *, rank: int, world_size: int):
        self.rank = rank
        self.world_size = world_size
        self.token = AbortToken()
        """Aborted when the coordinator ends the run, or the connection to it breaks."""
        self._connection = connection
        self._stop = threading.Event()
        self._goodbye = threading.Event()
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: dict[int, _Answer] = {}
        self._ids = itertools.count()
        for work, name in ((self._read_until_closed, "control-reader"), (self._write_until_closed, "control-writer")):
            threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def stop_requested(self) -> bool:
        """A person or a cluster asks for a stop: finish the step and leave. Ranks may see it at different steps."""
        return self._stop.is_set()

    def set(self, key: str, value: bytes) -> None:
        """Stores `value` under `key` for every worker."""
        self._send({"op": "set", "key": key}, value)

    def get(self, key: str, token: AbortToken) -> bytes:
        """The value of `key`, waiting until some worker has set it; raises EpochEnded when `token` is aborted."""
        return self._ask({"op": "get", "key": key}, token).payload

    def check(self, keys: list[str], token: AbortToken) -> bool:
        """Whether all `keys` are set."""
        return bool(self._ask({"op": "check", "keys": keys}, token).header["found"])

    def add(self, key: str, amount: int, token: AbortToken) -> int:
        """Adds to the counter `key` (from 0), returns its new value."""
        return int(self._ask({"op": "add", "key": key, "amount": amount}, token).header["value"])

    def publish(self, record: dict[str, Any]) -> None:
        """Hands a record to the run's report; never waits."""
        self._send({"op": "publish", "record": record})

    def report_error(self, error: dict[str, Any]) -> None:
        """Tells why this worker is about to fail (`verdict.describe_error`)."""
        self._send({"op": "error", "error": error})

    def finish(self, exit_code: int) -> None:
        """Says goodbye; returns when the coordinator has read everything said before, at the latest after 5 s."""
        self._send({"op": "finish", "exit_code": exit_code})
        self._goodbye.wait(GOODBYE_S)
        self._close("this worker has finished")

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self._outbox.put(encode_frame(header, payload))

    def _ask(self, header: dict[str, Any], token: AbortToken) -> _Answer:
        number, answer = next(self._ids), _Answer()
        self._answers[number] = answer
        try:
            self._send({**header, "id": number})
            while not answer.arrived.wait(POLL_S):
                token.check()
                self.token.check()
            return answer
        finally:
            del self._answers[number]

    def _write_until_closed(self) -> None:
        try:
            while True:
                self._connection.sendall(self._outbox.get())  # bounded: a daemon thread that nobody waits for
        except OSError as error:
            self._close(f"the connection to the coordinator broke ({error})")

    def _read_until_closed(self) -> None:
        reader = FrameReader()
        try:
            while data := self._connection.recv(CHUNK_BYTES):  # bounded: ends when the connection does
                for header, payload in reader.feed(data):
                    self._heed(header, payload)
            self._close("the coordinator is gone")
        except (OSError, ProtocolError) as error:
            self._close(f"the connection to the coordinator broke ({error})")

    def _heed(self, header: dict[str, Any], payload: bytes) -> None:
        match header.get("op"):
            case "answer":
                if answer := self._answers.get(header["id"]):
                    answer.header, answer.payload = header, payload
                    answer.arrived.set()
            case "stop":
                self._stop.set()
            case "abort":
                self.token.abort(header["reason"])
            case "bye":
                self._goodbye.set()
            case op:
                raise ProtocolError(f"the coordinator sent {op!r}")

    def _close(self, reason: str) -> None:
        self._goodbye.set()
        self.token.abort(reason)
        with contextlib.suppress(OSError):  # close() alone would leave the other thread in its system call
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
