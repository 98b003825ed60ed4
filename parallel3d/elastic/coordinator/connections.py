"""The coordinator's connections: who is there, what they say, what is still to be sent. One thread, one selector."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parallel3d.elastic.worker.control_channel import CHUNK_BYTES, FrameReader, encode_frame, set_options
from parallel3d.errors import ProtocolError


@dataclass(eq=False)
class Connection:
    """One connection: a worker's (`rank`) or a guardian's (`guarded`), once it has said hello."""

    socket: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    outbox: bytearray = field(default_factory=bytearray)
    rank: int | None = None
    guarded_ranks: tuple[int, ...] = ()
    hello: dict[str, Any] = field(default_factory=dict)
    """What it has said of itself."""


OnMessage = Callable[[Connection, dict[str, Any], bytes], None]
"""What is done with a frame."""


class ConnectionServer:
    """Accepts whoever connects, hands frames to `hear`, tells `lose` of connections that are gone."""

    def __init__(self, listener: socket.socket, *, on_message: OnMessage, on_lost: Callable[[Connection], None]):
        self.connections: set[Connection] = set()
        self._listener = listener
        self._on_message = on_message
        self._on_lost = on_lost
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def poll(self, timeout_s: float) -> None:
        """Waits for news, at most `timeout_s`, and deals with it."""
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
        """Never waits: what the peer does not take now follows in later turns."""
        self.send_encoded(connection, encode_frame(header, payload))

    def send_encoded(self, connection: Connection, frame: bytes) -> None:
        connection.outbox += frame
        self._flush(connection)

    def dispatch(self, connection: Connection, header: dict[str, Any], payload: bytes) -> None:
        """Hands a frame on; one that makes no sense closes the connection, an error over one that does is ours."""
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

    def _accept(self) -> None:
        accepted_socket, _ = self._listener.accept()  # bounded: the selector says that someone is there
        accepted_socket.setblocking(False)
        set_options(accepted_socket)
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
