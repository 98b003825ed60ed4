"""One connection of the coordinator: a worker's, a guardian's, or a worker's through its guardian."""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from parallel3d.elastic.frames import FrameReader
from parallel3d.handshake import AcceptedHandshake

MAX_VALUE_BYTES = 16 * 2**20
"""Of a value that a worker stores."""
MAX_PARTS = 64
"""Parts of the outbox that one system call takes; Linux allows 1,024."""


@dataclass(eq=False, kw_only=True)
class Connection:
    """The other end; after its hello a worker (`rank`) or a guardian (`guarded_ranks`)."""

    rank: int | None = None
    guarded_ranks: tuple[int, ...] = ()
    hello: dict[str, Any] = field(default_factory=dict)
    """The header of its hello."""
    is_open: bool = True
    lost_because: str = ""
    """Why this end has closed it; "" if the other end has."""

    @property
    def role(self) -> str:
        """The role of its hello; "" before that."""
        return str(self.hello.get("role", ""))


@dataclass(eq=False, kw_only=True)
class SocketConnection(Connection):
    """A connection of its own."""

    socket: socket.socket
    handshake: AcceptedHandshake
    address: str
    """Of the other end."""
    since_s: float
    """When it was accepted."""
    reader: FrameReader = field(default_factory=lambda: FrameReader(MAX_VALUE_BYTES))
    outbox: deque[bytes | memoryview] = field(default_factory=deque)
    """What is still to be sent. Connections share the bytes of a frame that goes to many."""
    awaits_room: bool = False
    """Whether the selector reports when it takes more."""
    silent_pings: int = 0
    """Pings sent since its last frame."""
    relayed: dict[int, RelayedConnection] = field(default_factory=dict)
    """The workers that speak through this guardian."""

    def send_outbox(self) -> None:
        """Sends what the socket takes now; raises OSError if it is broken."""
        while self.outbox:
            try:
                num_sent = self.socket.sendmsg(list(islice(self.outbox, MAX_PARTS)))  # bounded: does not block
            except BlockingIOError:
                return
            while num_sent:
                first = self.outbox.popleft()
                if num_sent < len(first):
                    self.outbox.appendleft(memoryview(first)[num_sent:])
                    num_sent = 0
                else:
                    num_sent -= len(first)


@dataclass(eq=False, kw_only=True)
class RelayedConnection(Connection):
    """A worker that speaks through its guardian."""

    relay: SocketConnection
    relay_rank: int
    """Its rank, before its hello too."""
