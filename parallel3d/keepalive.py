"""TCP keepalive: an idle connection ends when the kernel at its other end has long not answered.

Whether a process there runs does not matter: a stopped or busy one costs no connection. What is on its way and not
acknowledged ends a connection by `TCP_USER_TIMEOUT` alone, which also counts the time for which the other end does not
read: right for frames that a selector reads, wrong for links whose receiver is behind.
"""

from __future__ import annotations

import socket
import sys


def keep_alive(connection: socket.socket, *, idle_s: int, interval_s: int, num_probes: int) -> None:
    """Ends a connection after `idle_s` + `num_probes` * `interval_s` seconds without an answer of the other kernel."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, idle_s),
            (socket.TCP_KEEPINTVL, interval_s),
            (socket.TCP_KEEPCNT, num_probes),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
