"""The workers' control channels: socket pairs, whose other end the guardian relays to the coordinator and back.

Up, what a turn of the loop has read goes on in batches, in each worker's order. Down, a frame for several workers comes
once. Neither waits: a worker that does not read is lost, and while the coordinator does not read, workers are not read.

A coordinator that takes over gets each worker's hello first, with its membership state, then what it has said in
between. What a worker has said to the lost one about a change of membership is over with it, up to that hello; and
what it has recorded up to there it says again, in order.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel3d.elastic.frame_schemas import is_address, is_hex
from parallel3d.elastic.frames import (
    CHUNK_BYTES,
    MAX_VALUE_BYTES,
    PING_S,
    REPEATED_RECORDS,
    FrameReader,
    encode_frame,
    encode_from_workers,
)
from parallel3d.elastic.guardian.coordinator_link import CoordinatorLink
from parallel3d.elastic.outbox import Outbox
from parallel3d.elastic.protocol.membership import Address
from parallel3d.errors import ProtocolError

MAX_BATCH_BYTES = 2**20
"""Of several frames; a larger one travels alone."""
MAX_UNSENT_BYTES = 32 * 2**20
"""More than this for the coordinator, and workers are not read."""
MAX_UNREAD_BYTES = 64 * 2**20
"""A worker with more than this unread is lost."""
BROKEN_CHANNEL_S = 2.0
"""How long a worker may live on without its channel."""
TO_ITS_COORDINATOR = frozenset(
    ("report", "entries", "request_record", "committed", "confirm", "suspect", "finish_generation", "probed", "ready")
)
"""Frames that mean nothing to another coordinator."""


@dataclass(eq=False, kw_only=True)
class _Channel:
    """One worker's."""

    rank: int
    socket: socket.socket
    reader: FrameReader = field(default_factory=lambda: FrameReader(MAX_VALUE_BYTES))
    outbox: Outbox = field(default_factory=Outbox)
    num_hellos_due: int = 1
    """One at the start, and one after each loss of a coordinator."""
    hello: bytes = b""
    """The newest, while none is due."""
    held: list[bytes] = field(default_factory=list)
    """Frames that wait for a coordinator."""
    num_held_bytes: int = 0
    is_passed_on: bool = False
    """Whether the coordinator has its hello."""
    is_greeted: bool = False
    """Whether it knows that a coordinator has been found."""
    has_finished: bool = False
    permission: str = ""
    """Why it may end, in its last words."""
    is_open: bool = True
    watched: int = 0
    """The events for which its socket is registered."""


class WorkerChannels:
    """Relays for the workers at the other end of `ends`, by rank.

    on_located: a worker has found the coordinator's address and the run's secret.
    on_broken: a worker can't be relayed any more, and why.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        ends: Mapping[int, socket.socket],
        *,
        link: CoordinatorLink,
        on_located: Callable[[Address, bytes], None],
        on_broken: Callable[[int, str], None],
    ):
        self._selector = selector
        self._link = link
        self._on_located = on_located
        self._on_broken = on_broken
        self._batch: list[tuple[int, bytes]] = []
        """Frames for the coordinator, read in this turn."""
        self._broken: dict[int, float] = {}
        """Workers that have closed their channels: when they count as lost."""
        self._next_ping_s = 0.0
        self._channels: dict[int, _Channel] = {}
        for rank, end in ends.items():
            self._add(rank, end)

    def add(self, rank: int, end: socket.socket, secret: bytes) -> None:
        """Relays for one more worker, which the coordinator has asked for."""
        self._greet(self._add(rank, end), secret)

    def sockets(self) -> list[socket.socket]:
        """The open ones."""
        return [channel.socket for channel in self._channels.values() if channel.is_open]

    def turn(self) -> None:
        """Sends what the turn has brought; shows the workers that this process runs."""
        self.flush()
        now_s = time.monotonic()
        for rank in [rank for rank, due_s in self._broken.items() if now_s >= due_s]:
            del self._broken[rank]
            self._on_broken(rank, "its connection to the coordinator broke")
        if now_s >= self._next_ping_s:
            self._next_ping_s = now_s + PING_S
            self.send(self._channels, encode_frame({"op": "ping"}))

    def flush(self) -> None:
        """Passes the batch on to the coordinator, then reads workers only if it has kept up."""
        while self._batch:
            num_frames, num_bytes = 0, 0
            for _, frame in self._batch:
                num_bytes += len(frame)
                if num_frames and num_bytes > MAX_BATCH_BYTES:
                    break
                num_frames += 1
            self._link.send_encoded(encode_from_workers(self._batch[:num_frames]))
            del self._batch[:num_frames]
        for channel in self._channels.values():
            self._watch(channel)

    def on_welcome(self, secret: bytes) -> None:
        """Passes on hellos, and what has been held, to a coordinator that serves."""
        for channel in self._channels.values():
            self._greet(channel, secret)
            self._pass_on(channel)
        self.flush()

    def _add(self, rank: int, end: socket.socket) -> _Channel:
        channel = self._channels[rank] = _Channel(rank=rank, socket=end)
        end.setblocking(False)
        self._watch(channel)
        return channel

    def _greet(self, channel: _Channel, secret: bytes) -> None:
        """Lets a worker know, once, that a coordinator has been found."""
        if not channel.is_greeted:
            channel.is_greeted = True
            self.send([channel.rank], encode_frame({"op": "connected", "secret": secret.hex()}))

    def lose_coordinator(self, reason: str, *, is_final: bool) -> None:
        """Has the workers leave their generation and say hello again; `is_final`: or end, since none will take over."""
        self._batch.clear()
        for channel in self._channels.values():
            channel.num_hellos_due += 1
            channel.hello, channel.is_passed_on = b"", False
        self.send(self._channels, encode_frame({"op": "coordinator_lost", "reason": reason, "is_final": is_final}))

    def send(self, ranks: Iterable[int], frame: bytes) -> None:
        """Sends a frame to those of `ranks` that still have their channels."""
        for channel in [self._channels[rank] for rank in ranks if rank in self._channels]:
            if not channel.is_open:
                continue
            if channel.outbox.num_bytes > MAX_UNREAD_BYTES:
                self.close(channel.rank)
                self._on_broken(channel.rank, "it does not read what the coordinator sends")
                continue
            channel.outbox.add(frame)
            self._flush_down(channel)

    def drain(self, rank: int) -> str:
        """Takes what a worker that has ended has still said, and closes its channel; returns why it could end."""
        channel = self._channels[rank]
        while channel.is_open and self._receive(channel):  # bounded: its writer has ended
            pass
        self.close(rank)
        self._broken.pop(rank, None)
        self.flush()
        return channel.permission

    def close(self, rank: int) -> None:
        """Closes a worker's channel, which ends it."""
        channel = self._channels.get(rank)
        if channel is not None and channel.is_open:
            channel.is_open = False
            self._watch(channel)
            channel.socket.close()

    def close_all(self) -> None:
        for rank in self._channels:
            self.close(rank)

    # --- up -------------------------------------------------------------------------------------------------------

    def _on_ready(self, channel: _Channel) -> None:
        self._flush_down(channel)
        if channel.is_open and channel.watched & selectors.EVENT_READ:
            self._receive(channel)

    def _receive(self, channel: _Channel) -> bool:
        """Takes some of what a worker has said; returns False if there was nothing."""
        try:
            data = channel.socket.recv(CHUNK_BYTES)  # bounded: does not block
            for header, frame in channel.reader.feed_whole(data):
                self._take(channel, header, frame)
        except BlockingIOError:
            return False
        except ProtocolError as error:
            self.close(channel.rank)
            self._on_broken(channel.rank, f"its connection to the coordinator broke ({error})")
            return False
        except OSError:
            data = b""
        if not data:
            self.close(channel.rank)
            if not channel.has_finished:
                self._broken[channel.rank] = time.monotonic() + BROKEN_CHANNEL_S
        return bool(data)

    def _take(self, channel: _Channel, header: dict[str, Any], frame: bytes) -> None:
        """Handles or keeps a worker's frame. Raises ProtocolError for one that makes no sense here."""
        op = str(header.get("op"))
        if op == "located":
            self._locate(header)
        elif op == "hello":
            self._on_hello(channel, frame)
        elif channel.is_passed_on:
            self._batch.append((channel.rank, frame))
        elif channel.hello or not _is_void_before_hello(header):
            channel.held.append(frame)
            channel.num_held_bytes += len(frame)
            if not channel.hello and channel.num_held_bytes > MAX_UNSENT_BYTES:
                raise ProtocolError(f"{channel.num_held_bytes:,} bytes without a hello")
        if op == "finish":
            channel.has_finished, channel.permission = True, str(header.get("permission", ""))

    def _locate(self, header: dict[str, Any]) -> None:
        address, secret = header.get("address"), header.get("secret")
        if not is_address(address) or not is_hex(secret):
            raise ProtocolError("'located' without address or secret")
        self._on_located((address[0], address[1]), bytes.fromhex(secret))

    def _on_hello(self, channel: _Channel, frame: bytes) -> None:
        if not channel.num_hellos_due:
            raise ProtocolError("a hello that was not asked for")
        channel.num_hellos_due -= 1
        if not channel.num_hellos_due:
            channel.hello = frame
            self._pass_on(channel)

    def _pass_on(self, channel: _Channel) -> None:
        """Begins to relay for a worker that has said hello, if there is a coordinator."""
        if channel.hello and self._link.is_open and not channel.is_passed_on:
            self._batch += [(channel.rank, frame) for frame in (channel.hello, *channel.held)]
            channel.held, channel.num_held_bytes, channel.is_passed_on = [], 0, True

    # --- down, and what is watched --------------------------------------------------------------------------------

    def _flush_down(self, channel: _Channel) -> None:
        if channel.is_open:
            try:
                channel.outbox.send(channel.socket)
            except OSError:  # it is gone: the next read shows it
                channel.outbox = Outbox()
            self._watch(channel)

    def _watch(self, channel: _Channel) -> None:
        """Registers the socket for what can be done with it now."""
        events = 0
        if channel.is_open:
            if channel.num_held_bytes <= MAX_UNSENT_BYTES and self._link.num_unsent_bytes <= MAX_UNSENT_BYTES:
                events |= selectors.EVENT_READ
            if channel.outbox:
                events |= selectors.EVENT_WRITE
        if events == channel.watched:
            return
        if not channel.watched:
            self._selector.register(channel.socket, events, lambda: self._on_ready(channel))
        elif events:
            self._selector.modify(channel.socket, events, lambda: self._on_ready(channel))
        else:
            self._selector.unregister(channel.socket)
        channel.watched = events


def _is_void_before_hello(header: dict[str, Any]) -> bool:
    """Whether a frame before the hello that is due must not go on: out of place, or said again after it."""
    record = header.get("record")
    is_repeated = isinstance(record, dict) and record.get("kind") in REPEATED_RECORDS
    return str(header.get("op")) in TO_ITS_COORDINATOR or is_repeated
