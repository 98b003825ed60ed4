"""The coordinator's connections to workers and guardians. One thread, one selector, no blocking sends."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from parallel3d.elastic.frames import CHUNK_BYTES, FrameReader, encode_frame, set_socket_options
from parallel3d.errors import ProtocolError


@dataclass(eq=False)
class Connection:
    """One connection; after its hello a worker's (`rank`) or a guardian's (`guarded_ranks`)."""

    socket: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    outbox: bytearray = field(default_factory=bytearray)
    rank: int | None = None
    guarded_ranks: tuple[int, ...] = ()
    hello: dict[str, Any] = field(default_factory=dict)
    """The header of its hello."""


OnMessage = Callable[[Connection, dict[str, Any], bytes], None]
"""Handles one frame."""


class ConnectionServer:
    """Accepts connections, passes frames to `on_message` and lost connections to `on_lost`."""

    def __init__(self, listener: socket.socket, *, on_message: OnMessage, on_lost: Callable[[Connection], None]):
        self.connections: set[Connection] = set()
        self._listener = listener
        self._on_message = on_message
        self._on_lost = on_lost
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def poll(self, timeout_s: float) -> None:
        """Waits for events, at most `timeout_s`, and handles them."""
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ and key.data in self.connections:
                self._read(key.data)

    def workers(self) -> dict[int, Connection]:
        return {connection.rank: connection for connection in self.connections if connection.rank is not None}

    def guardians(self) -> list[Connection]:
        return [connection for connection in self.connections if connection.guarded_ranks]

    def send(self, connection: Connection, header: dict[str, Any], payload: bytes = b"") -> None:
        """Sends a frame without waiting: what the peer does not take now follows in later polls."""
        self._send_encoded(connection, encode_frame(header, payload))

    def send_to_workers(self, ranks: Iterable[int], header: dict[str, Any]) -> None:
        """Sends a frame to those of `ranks` that are connected."""
        frame, workers = encode_frame(header), self.workers()
        for rank in ranks:
            if rank in workers:
                self._send_encoded(workers[rank], frame)

    def send_to_guardians(self, header: dict[str, Any]) -> None:
        for connection in self.guardians():
            self.send(connection, header)

    def broadcast(self, header: dict[str, Any]) -> None:
        """Sends a frame to all workers and guardians."""
        for connection in list(self.connections):
            if connection.guarded_ranks or connection.rank is not None:
                self.send(connection, header)

    def dispatch(self, connection: Connection, header: dict[str, Any], payload: bytes) -> None:
        """Passes a frame on. A frame that the protocol doesn't allow closes the connection; other errors are ours."""
        if connection in self.connections:
            try:
                self._on_message(connection, header, payload)
            except ProtocolError:
                self._drop(connection)
            except (KeyError, TypeError, ValueError):
                if connection.hello:
                    raise
                self._drop(connection)

    def close(self) -> None:
        self._listener.close()
        for connection in self.connections:
            connection.socket.close()

    def _send_encoded(self, connection: Connection, frame: bytes) -> None:
        connection.outbox += frame
        self._flush(connection)

    def _accept(self) -> None:
        accepted_socket, _ = self._listener.accept()  # bounded: the selector reports a waiting connection
        accepted_socket.setblocking(False)
        set_socket_options(accepted_socket)
        connection = Connection(accepted_socket)
        self.connections.add(connection)
        self._selector.register(accepted_socket, selectors.EVENT_READ, connection)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(CHUNK_BYTES)  # bounded: does not block
            for header, payload in connection.reader.feed(data):
                self.dispatch(connection, header, payload)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            data = b""
        if not data:
            self._drop(connection)

    def _flush(self, connection: Connection) -> None:
        if connection not in self.connections:
            return
        try:
            del connection.outbox[: connection.socket.send(connection.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        writing = selectors.EVENT_WRITE if connection.outbox else 0
        self._selector.modify(connection.socket, selectors.EVENT_READ | writing, connection)

    def _drop(self, connection: Connection) -> None:
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._on_lost(connection)
