"""A run's secret in tests, and connections that prove it."""

import socket

from parallel3d.handshake import connect_handshake

SECRET = b"the secret of a run under test.."


def get_secret() -> bytes:
    return SECRET


def enter(address, secret: bytes = SECRET) -> socket.socket:
    """A connection behind its handshake."""
    connection = socket.create_connection(address, timeout=10)
    connect_handshake(connection, secret)
    return connection
