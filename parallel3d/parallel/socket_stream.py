"""A stream over a connected socket. The end of the generation shuts the socket down, which wakes either call."""

from __future__ import annotations

import socket

from parallel3d.errors import GenerationEnded, ProtocolError
from parallel3d.parallel.abort import ABORT_GRACE_S, AbortToken
from parallel3d.parallel.stream import Stream


class SocketStream(Stream):
    """A connection with `peer` that has proven the run's secret and begun with this generation's hello."""

    def __init__(self, connection: socket.socket, *, peer: int, token: AbortToken, timeout_s: float):
        connection.settimeout(timeout_s)
        self._connection = connection
        self._peer = peer
        self._token = token
        self._timeout_s = timeout_s
        self._buffer = bytearray()

    def send(self, header: bytes, data: memoryview) -> None:
        self._token.check()
        try:
            self._connection.sendall(b"".join((header, data)))
        except OSError as error:
            raise self._ended(error) from None

    def receive(self, header: bytes, num_bytes: int) -> memoryview:
        self._token.check()
        if len(self._buffer) < len(header) + num_bytes:
            self._buffer = bytearray(len(header) + num_bytes)
        whole, count = memoryview(self._buffer)[: len(header) + num_bytes], 0
        try:
            while count < len(whole):
                received = self._connection.recv_into(whole[count:])  # bounded: by the socket's timeout
                if not received:
                    raise ConnectionError("closed by the peer")
                count += received
                if count >= len(header) and whole[: len(header)] != header:
                    raise ProtocolError(f"rank {self._peer} takes part in another collective than this rank")
        except OSError as error:
            raise self._ended(error) from None
        return whole[len(header) :]

    def close(self) -> None:
        self._connection.close()

    def _ended(self, error: OSError) -> GenerationEnded:
        """The end of the generation if it explains the error, else the error."""
        self._token.check()
        if isinstance(error, TimeoutError):
            return GenerationEnded(f"rank {self._peer} has not answered in {self._timeout_s:.0f} s")
        self._token.sleep(ABORT_GRACE_S)
        return GenerationEnded(f"the stream with rank {self._peer} broke: {error}")
