"""The control channel: how a worker talks to the run's coordinator.

Frames over TCP, no torch: a torch TCPStore ignores its timeouts when its host hangs, dies with the rank that hosts it,
and cannot push news. One frame:

    header length (4 bytes) | payload length (4 bytes) | header: a JSON object | payload: bytes

A worker's frames:  hello, set, get, check, add, publish, error, leave, finish, whereabouts
                    suspect, report, confirm, finish_generation: the membership protocol, see seat_control.py
A guardian's:       hello, ended, stop, leave, where
The coordinator's:  answer, stop, depart, abort, bye, where; seal, record, go, release
                    to guardians: welcome, roster, watch, stop, abort, over, where
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from parallel3d.elastic.protocol.membership import Address
from parallel3d.elastic.worker.control_client import FRAMES, ChannelMembershipClient
from parallel3d.errors import LaunchError, ProtocolError
from parallel3d.parallel.abort import POLL_S, AbortToken

MAX_HEADER_BYTES = 16 * 2**20
MAX_PAYLOAD_BYTES = 2**30
CHUNK_BYTES = 2**16
RETRY_S = 0.1
KEEPALIVE_S = 8
FINISH_ACK_S = 5.0

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
            set_options(connection)
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


def set_options(connection: socket.socket) -> None:
    """No delay for small frames; a host that has vanished without a word is noticed within `KEEPALIVE_S`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, 2),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, KEEPALIVE_S - 2),
            (socket.TCP_USER_TIMEOUT, KEEPALIVE_S * 1000),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


@dataclass
class _Response:
    arrived: threading.Event = field(default_factory=threading.Event)
    header: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


Reconnect = Callable[[dict[str, Any]], socket.socket | None]
"""Given what this worker knows of membership, a connection to the coordinator's successor; None: there is none."""


class ControlChannel:
    """A worker's end of the channel. All methods may be called from any thread; only the store's calls wait."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        rank: int,
        world_size: int,
        reconnect: Reconnect = lambda membership_state: None,
    ):
        self.rank = rank
        self.world_size = world_size
        self.token = AbortToken()
        """Aborted when the coordinator ends the run, or the connection to it breaks."""
        self.membership = ChannelMembershipClient(rank=rank, send=self._send, run_token=self.token)
        """This worker's part in changes of membership."""
        self.worker_status: Callable[[], dict[str, Any]] = lambda: {}
        """Says where this worker is, on the channel's own thread."""
        self._connection = connection
        self._reconnect = reconnect
        self._replaced = threading.Condition()
        """Guards `_connection`; notified when that is another one, or none any more."""
        self._stop = threading.Event()
        self._drain = threading.Event()
        self._finish_acked = threading.Event()
        self._is_finishing = self._closed = False
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._responses: dict[int, _Response] = {}
        self._ids = itertools.count()
        for work, name in ((self._read_until_closed, "control-reader"), (self._write_until_closed, "control-writer")):
            threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def stop_requested(self) -> bool:
        """A person or a cluster asks for a stop: finish the step and leave. Ranks may see it at different steps."""
        return self._stop.is_set()

    @property
    def drain_requested(self) -> bool:
        """This worker is to leave, and the run can go on without it: ask for a change at the next step boundary."""
        return self._drain.is_set()

    def announce_drain(self) -> None:
        """Announces that this worker will have to go soon; safe within a signal handler."""
        self._send({"op": "announce_drain"})

    def set(self, key: str, value: bytes) -> None:
        """Stores `value` under `key` for every worker."""
        self._send({"op": "set", "key": key}, value)

    def get(self, key: str, token: AbortToken) -> bytes:
        """The value of `key`, waiting until some worker has set it; raises GenerationEnded when `token` is aborted."""
        return self._request({"op": "get", "key": key}, token).payload

    def get_all(self, keys: list[str], token: AbortToken) -> list[bytes]:
        """The values of all `keys` in one exchange, waiting until each is set."""
        response = self._request({"op": "get_all", "keys": keys}, token)
        ends = list(accumulate(response.header["sizes"]))
        return [response.payload[end - size : end] for size, end in zip(response.header["sizes"], ends)]

    def check(self, keys: list[str], token: AbortToken) -> bool:
        """Whether all `keys` are set."""
        return bool(self._request({"op": "check", "keys": keys}, token).header["found"])

    def add(self, key: str, amount: int, token: AbortToken) -> int:
        """Adds to the counter `key` (from 0), returns its new value."""
        return int(self._request({"op": "add", "key": key, "amount": amount}, token).header["value"])

    def publish(self, record: dict[str, Any]) -> None:
        """Hands a record to the run's report; never waits."""
        self._send({"op": "publish", "record": record})

    def report_error(self, error: dict[str, Any]) -> None:
        """Tells why this worker is about to fail (`verdict.describe_error`)."""
        self._send({"op": "error", "error": error})

    def finish(self, exit_code: int) -> None:
        """Says goodbye; returns when the coordinator has read everything said before, at the latest after 5 s."""
        self._is_finishing = True
        self._send({"op": "finish", "exit_code": exit_code})
        self._finish_acked.wait(FINISH_ACK_S)
        self._close("this worker has finished")

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self._outbox.put(encode_frame(header, payload))

    def _request(self, header: dict[str, Any], token: AbortToken) -> _Response:
        number, response = next(self._ids), _Response()
        self._responses[number] = response
        try:
            with self.token.waiting("the coordinator's store"):
                self._send({**header, "id": number})
                while not response.arrived.wait(POLL_S):
                    token.check()
                    self.token.check()
            return response
        finally:
            del self._responses[number]

    def _write_until_closed(self) -> None:
        while self._write(self._outbox.get()):  # bounded: a daemon thread that nobody waits for
            pass

    def _write(self, frame: bytes) -> bool:
        """Sends a frame, by the next connection if this one breaks; False when there is none."""
        while not self._closed:
            connection = self._connection
            try:
                connection.sendall(frame)
                return True
            except OSError:
                _shut(connection)  # so that the reader knows
                self._await_replacement(connection)
        return False

    def _await_replacement(self, connection: socket.socket) -> None:
        with self._replaced:
            self._replaced.wait_for(  # bounded: the reader finds another one, or closes
                lambda: self._closed or self._connection is not connection
            )

    def _read_until_closed(self) -> None:
        while not self._closed:
            reason = self._read(self._connection)
            if not self._reconnect_to_new_coordinator(reason):
                self._close(reason)

    def _read(self, connection: socket.socket) -> str:
        """Heeds what comes through a connection until it ends; returns why it did."""
        reader = FrameReader()
        try:
            while data := connection.recv(CHUNK_BYTES):  # bounded: ends when the connection does
                for header, payload in reader.feed(data):
                    self._handle(header, payload)
        except (OSError, ProtocolError) as error:
            return f"the connection to the coordinator broke ({error})"
        return "the coordinator is gone"

    def _reconnect_to_new_coordinator(self, reason: str) -> bool:
        """The generation is over, since nobody can say what becomes of it; another coordinator may begin the next
        one."""
        if self._is_finishing or self.token.aborted:
            return False
        self.membership.leave_generation(reason)
        connection = self._reconnect(self.membership.membership_state())
        if connection is None:
            return False
        with self._replaced:
            self._connection.close()
            self._connection = connection
            self._replaced.notify_all()
        return True

    def _handle(self, header: dict[str, Any], payload: bytes) -> None:
        match header.get("op"):
            case "response":
                if response := self._responses.get(header["id"]):
                    response.header, response.payload = header, payload
                    response.arrived.set()
            case "stop":
                self._stop.set()
            case "drain_request":
                self._drain.set()
            case "abort":
                self.token.abort(header["reason"])
            case "request_status":
                self._send({"op": "worker_status", "status": self.worker_status()})
            case "finish_ack":
                self._finish_acked.set()
            case op if op in FRAMES:
                self.membership.handle(header)
            case op:
                raise ProtocolError(f"the coordinator sent {op!r}")

    def _close(self, reason: str) -> None:
        self._finish_acked.set()
        self.token.abort(reason)
        with self._replaced:
            self._closed = True
            self._replaced.notify_all()
        _shut(self._connection)
        self._connection.close()


def _shut(connection: socket.socket) -> None:
    """Ends a connection for both threads: close() alone would leave the other one in its system call."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
