"""The coordinator's listening socket."""

from __future__ import annotations

import socket

from parallel3d.errors import LaunchError


def open_listener(host: str, port: int) -> socket.socket:
    """Opens the coordinator's listening socket; port 0 takes a free one. Raises LaunchError if the port is taken."""
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise LaunchError(
            f"can't listen at port {port} ({error}): choose another one (--master_port of your launcher)"
        ) from None
