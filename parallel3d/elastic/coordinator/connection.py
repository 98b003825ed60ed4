"""One connection of the coordinator: a guardian's, or a worker's through its guardian (in tests: its own)."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any

from parallel3d.elastic.frames import MAX_RELAYED_BYTES, FrameReader
from parallel3d.elastic.outbox import Outbox
from parallel3d.errors import ProtocolError, shorten
from parallel3d.handshake import AcceptedHandshake


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

    def check_hello(self, header: dict[str, Any]) -> None:
        """Raises ProtocolError if this connection may not say this hello."""


@dataclass(eq=False, kw_only=True)
class SocketConnection(Connection):
    """A connection of its own."""

    socket: socket.socket
    handshake: AcceptedHandshake
    address: str
    """Of the other end."""
    since_s: float
    """When it was accepted."""
    reader: FrameReader = field(default_factory=lambda: FrameReader(MAX_RELAYED_BYTES))
    outbox: Outbox = field(default_factory=Outbox)
    awaits_room: bool = False
    """Whether the selector reports when it takes more."""
    silent_pings: int = 0
    """Pings sent since its last frame."""
    relayed: dict[int, RelayedConnection] = field(default_factory=dict)
    """The workers that speak through this guardian."""


@dataclass(eq=False, kw_only=True)
class RelayedConnection(Connection):
    """A worker that speaks through its guardian."""

    relay: SocketConnection
    relay_rank: int
    """Its rank, before its hello too."""

    def check_hello(self, header: dict[str, Any]) -> None:
        if (header["role"], header["ranks"]) != ("worker", [self.relay_rank]):
            raise ProtocolError(
                f"hello from {header['role']} {shorten(str(header['ranks']))} as rank {self.relay_rank}"
            )
