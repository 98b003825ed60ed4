"""One connection of the coordinator: a guardian's, itself or through a relay, or a worker's through its guardian (in
tests: its own)."""

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
    tunnelled: dict[int, TunnelledConnection] = field(default_factory=dict)
    """The guardians that speak through this relay, by their numbers there."""
    num_tunnelled: int = 0
    """Of guardians that ever spoke through it."""


@dataclass(eq=False, kw_only=True)
class TunnelledConnection(Connection):
    """A guardian that speaks through its host's relay."""

    relay: SocketConnection
    number: int
    """Its number there."""
    relayed: dict[int, RelayedConnection] = field(default_factory=dict)
    """The workers that speak through this guardian."""

    def check_hello(self, header: dict[str, Any]) -> None:
        if header["role"] != "guardian":
            raise ProtocolError(f"hello from {header['role']} as a guardian")


@dataclass(eq=False, kw_only=True)
class RelayedConnection(Connection):
    """A worker that speaks through its guardian."""

    guardian: SocketConnection | TunnelledConnection
    relay_rank: int
    """Its rank, before its hello too."""

    def check_hello(self, header: dict[str, Any]) -> None:
        ranks = header.get("ranks")
        if (header["role"], ranks) != ("worker", [self.relay_rank]):
            raise ProtocolError(f"hello from {header['role']} {shorten(str(ranks))} as rank {self.relay_rank}")
