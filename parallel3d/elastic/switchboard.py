"""The coordinator's connections: who is there, what they say, what is still to be sent. One thread, one selector."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parallel3d.elastic.control import CHUNK_BYTES, FrameReader, encode_frame, set_options
from parallel3d.errors import ProtocolError


@dataclass(eq=False)
class Peer:
    """One connection: a worker's (`rank`) or a guardian's (`guarded`), once it has said hello."""

    socket: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    outbox: bytearray = field(default_factory=bytearray)
    rank: int | None = None
    guarded: tuple[int, ...] = ()
    hello: dict[str, Any] = field(default_factory=dict)
    """What it has said of itself."""


Hear = Callable[[Peer, dict[str, Any], bytes], None]
"""What is done with a frame."""


class Switchboard:
    """Accepts whoever connects, hands frames to `hear`, tells `lose` of connections that are gone."""

    def __init__(self, listener: socket.socket, *, hear: Hear, lose: Callable[[Peer], None]):
        self.peers: set[Peer] = set()
        self._listener = listener
        self._hear = hear
        self._lose = lose
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def turn(self, timeout_s: float) -> None:
        """Waits for news, at most `timeout_s`, and deals with it."""
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ and key.data in self.peers:
                self._read(key.data)

    def workers(self) -> dict[int, Peer]:
        return {peer.rank: peer for peer in self.peers if peer.rank is not None}

    def guardians(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.guarded]

    def send(self, peer: Peer, header: dict[str, Any], payload: bytes = b"") -> None:
        """Never waits: what the peer does not take now follows in later turns."""
        self.send_encoded(peer, encode_frame(header, payload))

    def send_encoded(self, peer: Peer, frame: bytes) -> None:
        peer.outbox += frame
        self._flush(peer)

    def deliver(self, peer: Peer, header: dict[str, Any], payload: bytes) -> None:
        """Hands a frame on; one that makes no sense closes the connection, an error over one that does is ours."""
        if peer in self.peers:
            try:
                self._hear(peer, header, payload)
            except ProtocolError:
                self._drop(peer)
            except (KeyError, TypeError, ValueError):
                if peer.hello:
                    raise
                self._drop(peer)

    def close(self) -> None:
        self._listener.close()
        for peer in self.peers:
            peer.socket.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()  # bounded: the selector says that someone is there
        connection.setblocking(False)
        set_options(connection)
        peer = Peer(connection)
        self.peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.socket.recv(CHUNK_BYTES)  # bounded: does not block
            for header, payload in peer.reader.feed(data):
                self.deliver(peer, header, payload)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            data = b""
        if not data:
            self._drop(peer)

    def _flush(self, peer: Peer) -> None:
        if peer not in self.peers:
            return
        try:
            del peer.outbox[: peer.socket.send(peer.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        writing = selectors.EVENT_WRITE if peer.outbox else 0
        self._selector.modify(peer.socket, selectors.EVENT_READ | writing, peer)

    def _drop(self, peer: Peer) -> None:
        if peer not in self.peers:
            return
        self.peers.discard(peer)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        self._lose(peer)
