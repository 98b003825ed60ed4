"""Streams between ranks that are threads."""

from __future__ import annotations

from collections import defaultdict, deque

from parallel3d.errors import ProtocolError
from parallel3d.inprocess.scheduler import ThreadScheduler
from parallel3d.parallel.stream import Stream, StreamSource

Queues = defaultdict[tuple[str, int, int], deque[tuple[bytes, bytes]]]
"""Messages on their way, by (group, source, destination)."""


class ThreadStream(Stream):
    """The stream of `rank` with `peer` in one group, whose name contains the generation."""

    def __init__(self, scheduler: ThreadScheduler, queues: Queues, group: str, rank: int, peer: int):
        self._scheduler = scheduler
        self._group = group
        self._rank = rank
        self._peer = peer
        self._outgoing, self._incoming = scheduler.run_locked(
            lambda: (queues[group, rank, peer], queues[group, peer, rank])
        )

    def send(self, header: bytes, data: memoryview) -> None:
        self._scheduler.count_call(self._rank)
        message = (header, bytes(data))
        self._scheduler.run_locked(lambda: self._outgoing.append(message))

    def receive(self, header: bytes, num_bytes: int) -> memoryview:
        self._scheduler.count_call(self._rank)
        self._scheduler.wait(
            self._rank, lambda: bool(self._incoming), lambda: f"for rank {self._peer} in {self._group}"
        )
        found, data = self._scheduler.run_locked(self._incoming.popleft)
        if found != header or len(data) != num_bytes:
            raise ProtocolError(f"rank {self._peer} takes part in another collective of {self._group}")
        return memoryview(bytearray(data))  # writable, as a socket's buffer is

    def close(self) -> None:
        return None


def thread_streams(scheduler: ThreadScheduler, queues: Queues, group: str, rank: int) -> StreamSource:
    """Opens the streams of `rank` in a group."""

    def open_stream(peer: int) -> Stream:
        return ThreadStream(scheduler, queues, group, rank, peer)

    return StreamSource(connect=open_stream, accept=open_stream)
