"""Proves to both ends of a connection that they belong to the same run, before either parses anything else.

    connecting end                             accepting end
    "p3d-auth" | nonce c                  ->
                                          <-   nonce a | HMAC(secret, "accept" | c | a)
    HMAC(secret, "connect" | c | a)       ->   from here on: frames, messages

HMAC-SHA256 (RFC 2104) over fresh nonces of 16 bytes: a recorded handshake proves nothing later, and neither end can be
made to sign what the other one should. What follows is not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket

SECRET_BYTES = 32
NONCE_BYTES = 16
PROOF_BYTES = 32
REQUEST = b"p3d-auth"
HANDSHAKE_S = 30.0
"""How long an accepting end waits for a handshake. Connecting ends have timeouts of their own."""


class NotOfThisRunError(OSError):
    """The other end of a connection does not know the run's secret."""


def new_secret() -> bytes:
    """A secret for one run."""
    return secrets.token_bytes(SECRET_BYTES)


class AcceptedHandshake:
    """The accepting end, without input and output: `feed` takes what has arrived and returns what to send."""

    def __init__(self, secret: bytes):
        self._secret = secret
        self._received = bytearray()
        self._nonces: bytes | None = None
        self.is_proven = False
        """Whether the other end has proven that it knows the secret."""

    @property
    def num_missing(self) -> int:
        """Bytes of the handshake that are still to come; what follows them is not part of it."""
        if self.is_proven:
            return 0
        expected = len(REQUEST) + NONCE_BYTES if self._nonces is None else PROOF_BYTES
        return expected - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Takes at most `num_missing` bytes. Raises NotOfThisRunError as soon as they can't be right."""
        assert len(data) <= self.num_missing
        self._received += data
        if self._nonces is None:
            if not REQUEST.startswith(self._received[: len(REQUEST)]):
                raise NotOfThisRunError("no handshake")
            if self.num_missing:
                return b""
            own = secrets.token_bytes(NONCE_BYTES)
            self._nonces = bytes(self._received[len(REQUEST) :]) + own
            self._received.clear()
            return own + _proof(self._secret, b"accept", self._nonces)
        if not self.num_missing:
            if not hmac.compare_digest(bytes(self._received), _proof(self._secret, b"connect", self._nonces)):
                raise NotOfThisRunError("another secret")
            self.is_proven = True
        return b""


class ConnectingHandshake:
    """The connecting end, without input and output: after `request`, `feed` takes what arrives and returns what to
    send."""

    def __init__(self, secret: bytes):
        self._secret = secret
        self._own = secrets.token_bytes(NONCE_BYTES)
        self._received = bytearray()
        self.request = REQUEST + self._own
        self.is_proven = False
        """Whether the other end has proven that it knows the secret."""

    @property
    def num_missing(self) -> int:
        """Bytes of the answer that are still to come; what follows them is not part of it."""
        return NONCE_BYTES + PROOF_BYTES - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Takes at most `num_missing` bytes. Raises NotOfThisRunError if they are not right."""
        assert len(data) <= self.num_missing
        self._received += data
        if self.num_missing:
            return b""
        answer = bytes(self._received)
        nonces = self._own + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(self._secret, b"accept", nonces)):
            raise NotOfThisRunError("the other end does not know this run's secret")
        self.is_proven = True
        return _proof(self._secret, b"connect", nonces)


def connect_handshake(connection: socket.socket, secret: bytes) -> None:
    """Runs the connecting end on a blocking socket with a timeout; raises OSError, NotOfThisRunError among them."""
    handshake = ConnectingHandshake(secret)
    connection.sendall(handshake.request)
    connection.sendall(handshake.feed(_receive(connection, handshake.num_missing)))


def accept_handshake(connection: socket.socket, secret: bytes) -> None:
    """Runs the accepting end on a blocking socket with a timeout; raises OSError, NotOfThisRunError among them."""
    handshake = AcceptedHandshake(secret)
    while not handshake.is_proven:
        if reply := handshake.feed(_receive(connection, handshake.num_missing)):
            connection.sendall(reply)


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, side + nonces, "sha256")


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))  # bounded: by the socket's timeout
        if not part:
            raise NotOfThisRunError("closed during the handshake")
        data += part
    return bytes(data)
