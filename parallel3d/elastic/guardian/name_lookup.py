"""Looks up a host's name without blocking: the system's resolver may take longer than a process may be silent."""

from __future__ import annotations

import os
import resource
import signal
import socket

from parallel3d.elastic.child_processes import fork_bound
from parallel3d.elastic.protocol.membership import Address

MAX_ANSWER_BYTES = 512
"""Less than what a pipe takes at once."""


def as_numeric(address: Address) -> Address | None:
    """Returns the address if it needs no look-up."""
    try:
        socket.getaddrinfo(*address, socket.AF_INET, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return None
    return address


class NameLookup:
    """A child process that asks the resolver. `fileno()` is readable once `address` has one; then, or before: `close`.

    A process rather than a thread, since the guardian forks workers.
    """

    def __init__(self, address: Address):
        self._address = address
        self._answer, writer = os.pipe()
        self._pid = fork_bound("lookup", lambda: self._run(writer))
        os.close(writer)

    def fileno(self) -> int:
        return self._answer

    def address(self) -> Address:
        """Returns the numeric address; raises OSError. Does not block once `fileno()` is readable."""
        host, _, error = os.read(self._answer, MAX_ANSWER_BYTES).decode(errors="replace").partition("\n")
        if not host:
            raise OSError(error or f"the look-up of {self._address[0]} ended")
        return host, self._address[1]

    def close(self) -> None:
        os.close(self._answer)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)  # bounded: SIGKILL ends a process

    def _run(self, writer: int) -> int:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.closerange(3, writer)  # a connection that the guardian closes must not stay open in here
        os.closerange(writer + 1, limit)
        try:
            found = socket.getaddrinfo(*self._address, socket.AF_INET, socket.SOCK_STREAM)
            answer = f"{found[0][4][0]}\n"
        except OSError as error:
            answer = f"\n{error}"
        os.write(writer, answer.encode()[:MAX_ANSWER_BYTES])
        return 0
