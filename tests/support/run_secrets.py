"""A run's secret in tests, and connections that prove it."""

import socket
from typing import Any

from parallel3d.elastic.frames import encode_frame, set_socket_options
from parallel3d.handshake import connect_handshake

SECRET = b"the secret of a run under test.."


def enter(address, secret: bytes = SECRET) -> socket.socket:
    """A connection behind its handshake."""
    connection = socket.create_connection(address, timeout=10)
    connect_handshake(connection, secret)
    return connection


def open_connection(address, hello: dict[str, Any]) -> socket.socket:
    """A connection behind its handshake and a hello; it blocks without a timeout."""
    connection = enter(address)
    set_socket_options(connection)
    connection.sendall(encode_frame(hello))
    connection.settimeout(None)
    return connection
