"""Strangers at the ports of a run: where its processes listen, and what comes there that does not know its secret."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from parallel3d.elastic.frames import encode_frame
from parallel3d.handshake import NONCE_BYTES, PROOF_BYTES, REQUEST, connect_handshake
from tests.support.frame_examples import GOOD, HELLOS
from tests.support.launch_runs import name_of

Address = tuple[str, int] | bytes
"""Of TCP, or an abstract name of this host."""
TCP_LISTENS, UNIX_LISTENS = "0A", 0x10000
CONNECT_S = 60.0
HALF_OPEN = [REQUEST[: number % len(REQUEST)] for number in range(200)]
"""What silent ones have said of the handshake."""
HELLOS_OF_ALL = {role: encode_frame({"op": "hello", "role": role, **fields}) for role, fields in HELLOS.items()}
TALKS = [
    HELLOS_OF_ALL[role] + encode_frame({"op": op, **fields}) for role, ops in GOOD.items() for op, fields in ops.items()
]
"""Each frame that the coordinator knows, behind its sender's hello."""
GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(100),
    struct.pack(">II", 2**32 - 1, 2**32 - 1),
    encode_frame({"op": "set", "key": "a"}, bytes(2**20)),
    random.Random(1).randbytes(4096),
    REQUEST + bytes(NONCE_BYTES + PROOF_BYTES) + TALKS[0],
]


def descendants_of(pid: int) -> list[int]:
    children = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in _read(file).split()]
    return [found for child in children for found in (child, *descendants_of(child))]


def listening_ends(pids: Iterable[int]) -> dict[Address, str]:
    """Where these processes listen, over TCP and at names of this host, with the last one's name that does."""
    ends: dict[Address, str] = {}
    for pid in pids:
        inodes = _sockets_of(pid)
        for row in _rows(pid, "tcp") + _rows(pid, "tcp6"):
            if row[3] == TCP_LISTENS and row[9] in inodes:
                ends[_parse(row[1])] = name_of(pid)
        for row in _rows(pid, "unix"):
            if int(row[3], 16) & UNIX_LISTENS and row[6] in inodes:
                ends[row[7].replace("@", "\0", 1).encode()] = name_of(pid)
    return ends


def record_handshake(address: Address, secret: bytes) -> bytes:
    """What one of the run's own sends until it is known, as somebody on the way reads it."""
    recorded = bytearray()

    class Recorder(socket.socket):
        def sendall(self, data, flags: int = 0) -> None:  # type: ignore[no-untyped-def, override]
            recorded.extend(data)
            super().sendall(data, flags)

    assert isinstance(address, tuple)
    with Recorder(socket.AF_INET) as own:
        own.settimeout(CONNECT_S)
        own.connect(address)
        connect_handshake(own, secret)
    return bytes(recorded)


def whole_words(recorded: bytes) -> list[bytes]:
    """What shows at once that its sender does not belong to the run."""
    return [*GARBAGE, *TALKS, *(recorded + talk for talk in TALKS)]


def connect(address: Address) -> socket.socket:
    stranger = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX)
    stranger.settimeout(CONNECT_S)
    stranger.connect(address)
    stranger.setblocking(False)
    return stranger


def say(stranger: socket.socket, words: bytes) -> None:
    """Sends what fits, and does not care whether anybody listens."""
    with contextlib.suppress(OSError):
        stranger.send(words)


def num_closed(strangers: Iterable[socket.socket]) -> int:
    """How many of them the other end has closed."""
    return sum(map(_is_closed, strangers))


def _is_closed(stranger: socket.socket) -> bool:
    poll = select.poll()
    poll.register(stranger, select.POLLRDHUP)
    return any(event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _rows(pid: int, protocol: str) -> list[list[str]]:
    return [row.split() for row in _read(Path(f"/proc/{pid}/net/{protocol}")).splitlines()[1:]]


def _sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if link.startswith("socket:["):
                    found.add(link.removeprefix("socket:[").rstrip("]"))
    return found


def _parse(text: str) -> Address:
    """An address of /proc/net/tcp; of IPv6, only "all interfaces", which this host reaches over IPv4 too."""
    host, port = text.split(":")
    if len(host) > 8:
        assert int(host, 16) == 0, text
        return "127.0.0.1", int(port, 16)
    return socket.inet_ntoa(struct.pack("=I", int(host, 16))), int(port, 16)
