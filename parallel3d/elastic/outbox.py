"""Bytes still to be sent over a socket that does not block."""

from __future__ import annotations

import socket
from collections import deque
from itertools import islice

MAX_PARTS = 64
"""Parts that one system call takes; Linux allows 1,024."""


class Outbox:
    """Bytes in order. Outboxes share the bytes of a frame that goes to many."""

    def __init__(self) -> None:
        self._parts: deque[bytes | memoryview] = deque()
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, *parts: bytes) -> None:
        self._parts += parts
        self.num_bytes += sum(map(len, parts))

    def send(self, connection: socket.socket) -> None:
        """Sends what the socket takes now; raises OSError if it is broken."""
        while self._parts:
            try:
                num_sent = connection.sendmsg(list(islice(self._parts, MAX_PARTS)))  # bounded: does not block
            except BlockingIOError:
                return
            self.num_bytes -= num_sent
            while num_sent:
                first = self._parts.popleft()
                if num_sent < len(first):
                    self._parts.appendleft(memoryview(first)[num_sent:])
                    num_sent = 0
                else:
                    num_sent -= len(first)
