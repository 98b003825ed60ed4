"""The interface of streams: ordered connections between two ranks that one thread of each uses.

What a TreeGroup needs of its neighbours. Implementations: sockets (socket_stream.py) and threads of one process
(inprocess/thread_streams.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass


class Stream(ABC):
    """A connection with one peer in one membership generation. All calls raise GenerationEnded once that has ended."""

    @abstractmethod
    def send(self, header: bytes, data: memoryview) -> None:
        """Sends one message; may wait until the peer receives."""

    @abstractmethod
    def receive(self, header: bytes, num_bytes: int) -> memoryview:
        """Returns the data of the next message, valid until the next call. Raises ProtocolError unless it begins with
        `header`."""

    @abstractmethod
    def close(self) -> None:
        """Releases the connection."""


@dataclass(frozen=True, kw_only=True)
class StreamSource:
    """Opens the streams of one rank. Of two peers one connects, the other one waits for it."""

    connect: Callable[[int], Stream]
    accept: Callable[[int], Stream]
