"""Connections that others open to this process, and the frames on them. One thread, one selector, no blocking sends.

A connection that has not proven the run's secret (parallel3d/handshake.py) is a stranger: no frame of it is parsed. The
coordinator serves so (coordinator/connections.py), and the relay of a host (guardian/relay.py).
"""

from __future__ import annotations

import selectors
import socket
import time
from abc import ABC, abstractmethod
from typing import Any

from parallel3d.elastic.coordinator.connection import SocketConnection
from parallel3d.elastic.frames import CHUNK_BYTES, PING_S, encode_frame, max_silent_pings, set_socket_options
from parallel3d.errors import ProtocolError
from parallel3d.handshake import HANDSHAKE_S, AcceptedHandshake, NotOfThisRunError
from parallel3d.rejections import Rejections

MAX_STRANGERS = 1024
"""Connections in their handshake; of more the oldest is dropped, and retries if it is one of ours."""
PING: dict[str, Any] = {"op": "ping"}


class FrameServer(ABC):
    """Accepts connections, and splits what they send into frames."""

    called: str
    """What it is, for messages."""

    def __init__(self, listener: socket.socket, *, secret: bytes, control_s: float):
        self._secret = secret
        self._max_silent_pings = max_silent_pings(control_s)
        self._next_ping_s = time.monotonic() + PING_S
        self._strangers: dict[socket.socket, SocketConnection] = {}
        """Connections that have not proven yet that they know the secret, oldest first."""
        self.rejections = Rejections(to=self.called)
        self.connections: set[SocketConnection] = set()
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    @abstractmethod
    def on_frame(self, connection: SocketConnection, header: dict[str, Any], payload: bytes) -> None:
        """Handles a frame. ProtocolError closes the connection."""

    @abstractmethod
    def on_close(self, connection: SocketConnection) -> None:
        """Handles the end of a connection, which is closed."""

    def fileno(self) -> int:
        """The selector's, for another one: readable when `poll` has something to do."""
        return self._selector.fileno()

    def poll(self, timeout_s: float) -> None:
        """Waits for events, at most `timeout_s`, and handles them."""
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                self._accept_all()
                continue
            if key.data.socket in self._strangers:
                self._greet(key.data)
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ and key.data.is_open:
                self._read(key.data)
        self._drop_slow_strangers()
        self._ping()

    def write(self, connection: SocketConnection, *parts: bytes) -> None:
        """Sends without waiting: what the peer does not take now follows in later polls."""
        if not connection.is_open:
            return
        connection.outbox.add(*parts)
        if not connection.awaits_room:
            self._flush(connection)

    def close_connection(self, connection: SocketConnection) -> None:
        """Closes an open connection."""
        connection.is_open = False
        self.connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self.on_close(connection)

    def close(self) -> None:
        self._listener.close()
        for connection in (*self.connections, *self._strangers.values()):
            connection.socket.close()

    def _ping(self) -> None:
        """Shows all that this process runs, and drops guardians and relays that have long shown nothing."""
        now_s = time.monotonic()
        if now_s < self._next_ping_s:
            return
        self._next_ping_s = now_s + PING_S
        ping = encode_frame(PING)
        for connection in [each for each in self.connections if each.hello]:
            self.write(connection, ping)
            if connection.role in ("guardian", "relay"):
                connection.silent_pings += 1
                if connection.is_open and connection.silent_pings > self._max_silent_pings:
                    self.close_connection(connection)

    def _accept_all(self) -> None:
        """Accepts the connections that wait, as many as there may be strangers: others want their turn too."""
        for _ in range(MAX_STRANGERS):
            try:
                accepted_socket, address = self._listener.accept()  # bounded: does not block
            except BlockingIOError:
                return
            except OSError:  # it has gone again, or no descriptor is left
                self._drop_oldest_stranger()
                return
            self._add_stranger(accepted_socket, str(address[0]) if address else "this host")

    def _add_stranger(self, accepted_socket: socket.socket, address: str) -> None:
        accepted_socket.setblocking(False)
        set_socket_options(accepted_socket)
        connection = SocketConnection(
            socket=accepted_socket,
            handshake=AcceptedHandshake(self._secret),
            address=address,
            since_s=time.monotonic(),
        )
        self._strangers[accepted_socket] = connection
        self._selector.register(accepted_socket, selectors.EVENT_READ, connection)
        if len(self._strangers) > MAX_STRANGERS:
            self._drop_oldest_stranger()

    def _greet(self, connection: SocketConnection) -> None:
        """Takes the next bytes of a handshake. What follows it stays in the socket, for `_read`."""
        handshake = connection.handshake
        try:
            data = connection.socket.recv(handshake.num_missing)  # bounded: does not block
            if not data:
                raise NotOfThisRunError("closed")
            if reply := handshake.feed(data):
                if _has_given_up(connection.socket):
                    self._forget_stranger(connection)
                    return
                connection.socket.send(reply)  # 48 bytes fit into the empty buffer of a new connection
        except BlockingIOError:
            return
        except OSError:
            self._reject(connection)
            return
        if handshake.is_proven:
            del self._strangers[connection.socket]
            self.connections.add(connection)

    def _drop_slow_strangers(self) -> None:
        oldest_s = time.monotonic() - HANDSHAKE_S
        while self._strangers and next(iter(self._strangers.values())).since_s < oldest_s:
            self._drop_oldest_stranger()

    def _drop_oldest_stranger(self) -> None:
        if self._strangers:
            self._reject(next(iter(self._strangers.values())))

    def _reject(self, connection: SocketConnection) -> None:
        self._forget_stranger(connection)
        self.rejections.add(connection.address)

    def _forget_stranger(self, connection: SocketConnection) -> None:
        del self._strangers[connection.socket]
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _read(self, connection: SocketConnection) -> None:
        try:
            data = connection.socket.recv(CHUNK_BYTES)  # bounded: does not block
            connection.silent_pings = 0
            for header, payload in connection.reader.feed(data):
                if header != PING and connection.is_open:
                    self.on_frame(connection, header, payload)
        except BlockingIOError:
            return
        except ProtocolError as error:
            connection.lost_because, data = str(error), b""
        except OSError:
            data = b""
        if not data and connection.is_open:
            self.close_connection(connection)

    def _flush(self, connection: SocketConnection) -> None:
        if not connection.is_open:
            return
        try:
            connection.outbox.send(connection.socket)
        except OSError:
            self.close_connection(connection)
            return
        if connection.awaits_room != bool(connection.outbox):
            connection.awaits_room = bool(connection.outbox)
            writing = selectors.EVENT_WRITE if connection.awaits_room else 0
            self._selector.modify(connection.socket, selectors.EVENT_READ | writing, connection)


def _has_given_up(stranger: socket.socket) -> bool:
    """Whether the other end has closed before it got an answer: one of the run's own that has tried again since.

    A coordinator that takes over finds those in the listener's queue, which was there before it.
    """
    try:
        return not stranger.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)  # bounded: does not block
    except BlockingIOError:
        return False
