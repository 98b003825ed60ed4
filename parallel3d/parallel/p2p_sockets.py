"""Links over plain TCP sockets: one connection for each ordered pair of ranks that talk.

Per connection one thread writes from the sender's slots, another reads into the receiver's. Both release Python's lock
while bytes move, and both end when the abort token closes their socket, even in the middle of a message. A connection
begins with the proof that both ends belong to the run (parallel3d/handshake.py); one that fails it is closed and
breaks nothing.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from parallel3d.accelerator import Accelerator
from parallel3d.errors import GenerationEnded, ProtocolError
from parallel3d.handshake import HANDSHAKE_S, accept_handshake, connect_handshake
from parallel3d.keepalive import keep_alive
from parallel3d.parallel.abort import ABORT_GRACE_S, AbortToken
from parallel3d.parallel.p2p_messages import HEADER_BYTES, Header, Links, verify_header
from parallel3d.parallel.socket_stream import SocketStream
from parallel3d.parallel.staged_group import HostCopy
from parallel3d.parallel.stream import StreamSource
from parallel3d.rejections import Rejections

OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""After these an accept may succeed again."""
_HELLO = struct.Struct("<II?")  # generation, source rank, whether a stream follows instead of messages
Address = tuple[str, int]
LINK_IDLE_S = 30
"""After as long again a link to a host that is gone breaks: later than the coordinator finds a host or a path that is
cut (elastic.control_timeout_s is 30 s), sooner than a wait gives up."""

MAX_STRANGERS = 128
"""Connections in their handshake, each with a thread; of more the oldest is closed."""
ACCEPT_RETRY_S = 0.1
"""Until another try to accept, where no descriptor was left."""


def open_listener(host: str, port: int = 0) -> socket.socket:
    """Opens a listening socket on `port` of `host` (0: a free one); publish its address before a peer connects."""
    return socket.create_server((host, port), backlog=128)


class SocketLinks(Links):
    """Point-to-point links over sockets.

    `address_of(rank)` is called on the first send to a rank and may block until that rank has published it. Tensors
    of `accelerator` may be sent; received ones are on the host, with an accelerator in pinned memory.
    """

    def __init__(
        self,
        *,
        rank: int,
        generation: int,
        secret: bytes,
        listener: socket.socket,
        address_of: Callable[[int], Address],
        slots: int,
        token: AbortToken,
        timeout_s: float,
        accelerator: Accelerator | None = None,
        log: Callable[[str], None] = print,
    ):
        """`log` gets a line about connections that were rejected, at most once a minute, and at the end."""
        self._rank = rank
        self._accelerator = accelerator
        self._generation = generation
        self._secret = secret
        self._listener = listener
        self._address_of = address_of
        self._slots = slots
        self._token = token
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._outbox: dict[int, deque[tuple[Header, HostCopy]]] = {}
        self._inbox: dict[int, deque[tuple[Header, Tensor]]] = {}
        self._broken: dict[int, str] = {}
        self._sockets: list[socket.socket] = [listener]
        self._strangers: dict[socket.socket, None] = {}
        """Of these the accepted ones that have not proven yet that they belong to the run, oldest first."""
        self._rejections = Rejections(to=f"the links of rank {rank}")
        self._log = log
        self._streams: list[socket.socket] = []
        """Used by the rank's own thread, which must find them open: an abort only shuts them down."""
        self._accepted_streams: dict[int, SocketStream] = {}
        self._senders: list[threading.Thread] = []
        self._closing = False
        token.on_abort(self._end)
        self._start(self._accept)

    def send(self, destination: int, header: Header, tensor: Tensor, *, bounded: bool = True) -> None:
        copy = HostCopy(tensor.contiguous(), aside=True, accelerator=self._accelerator)
        with self._changed:
            if destination not in self._outbox:
                self._outbox[destination] = deque()
                self._senders.append(self._start(self._write_to, destination))
            queue = self._outbox[destination]
            self._await(lambda: len(queue) < self._slots or not bounded, destination, f"to send {header}")
            queue.append((header, copy))
            self._changed.notify_all()

    def receive(self, source: int, expected: Header) -> Tensor:
        with self._changed:
            queue = self._inbox.setdefault(source, deque())
            self._await(lambda: bool(queue), source, f"for {expected}")
            header, tensor = queue.popleft()
            self._changed.notify_all()
        verify_header(source, header, expected)
        return tensor

    @property
    def streams(self) -> StreamSource:
        """Opens streams, with the same addresses, proofs and end as the messages' connections."""
        return StreamSource(connect=self._connect_stream, accept=self._accept_stream)

    def _connect_stream(self, rank: int) -> SocketStream:
        try:
            return self._to_stream(self._connect(rank, is_stream=True), rank)
        except OSError as error:
            self._token.sleep(ABORT_GRACE_S)
            raise GenerationEnded(f"rank {self._rank} could not connect to rank {rank}: {error}") from None

    def _accept_stream(self, rank: int) -> SocketStream:
        with self._changed:
            self._await(lambda: rank in self._accepted_streams, rank, "for its stream")
            return self._accepted_streams.pop(rank)

    def _to_stream(self, connection: socket.socket, peer: int) -> SocketStream:
        stream = SocketStream(connection, peer=peer, token=self._token, timeout_s=self._timeout_s)
        with self._changed:
            if connection in self._sockets:  # else the end of the generation has closed it
                self._sockets.remove(connection)
                self._streams.append(connection)
        return stream

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._senders:
            thread.join(timeout=self._timeout_s)
        self._token.remove_callback(self._end)
        self._end()

    def _await(self, ready: Callable[[], bool], peer: int, what: str) -> None:
        """Waits, with the lock held, until ready; raises GenerationEnded on abort, a broken link or a timeout."""
        if ready() and not self._token.aborted:
            return
        with self._token.waiting(ranks=(peer,)):
            self._wait_for_peer(ready, peer, what)

    def _wait_for_peer(self, ready: Callable[[], bool], peer: int, what: str) -> None:
        self._changed.wait_for(lambda: ready() or self._token.aborted or peer in self._broken, timeout=self._timeout_s)
        if ready():
            return
        self._token.check()
        if peer in self._broken:
            self._changed.wait_for(lambda: self._token.aborted, timeout=ABORT_GRACE_S)
            self._token.check()
            raise GenerationEnded(f"rank {self._rank} waited {what}: link with rank {peer} broke: {self._broken[peer]}")
        raise GenerationEnded(f"rank {self._rank} waited {self._timeout_s:.0f} s {what} with rank {peer}")

    def _write_to(self, destination: int) -> None:
        """Runs on the sender's thread: connects, then writes messages until closed."""
        queue = self._outbox[destination]
        try:
            connection = self._connect(destination, is_stream=False)
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: queue or self._is_over())  # bounded: close, abort
                    if self._token.aborted or not queue:
                        return
                    header, copy = queue[0]
                data = _as_bytes(copy.read())
                self._token.check()
                connection.sendall(header.pack())
                connection.sendall(data)
                with self._changed:
                    queue.popleft()
                    self._changed.notify_all()
        except (OSError, GenerationEnded) as error:
            self._break(destination, error)

    def _connect(self, destination: int, *, is_stream: bool) -> socket.socket:
        connection = socket.create_connection(self._address_of(destination), timeout=self._timeout_s)
        self._keep(connection)
        connection.settimeout(self._timeout_s)
        connect_handshake(connection, self._secret)
        connection.settimeout(None)
        connection.sendall(_HELLO.pack(self._generation, self._rank, is_stream))
        return connection

    def _accept(self) -> None:
        """Runs on the listener's thread: starts a reader for each peer that connects."""
        while not self._token.aborted:
            try:
                connection, address = self._listener.accept()  # bounded: an abort closes it
            except OSError as error:
                if error.errno not in OUT_OF_DESCRIPTORS:
                    return  # closed
                self._close_oldest_stranger()
                time.sleep(ACCEPT_RETRY_S)
                continue
            with self._changed:
                self._strangers[connection] = None
                is_full = len(self._strangers) > MAX_STRANGERS
            if is_full:
                self._close_oldest_stranger()
            try:
                self._start(self._read_from, connection, str(address[0]))
            except RuntimeError:  # no thread is left
                self._reject(connection, str(address[0]))

    def _close_oldest_stranger(self) -> None:
        """Ends the handshake that has taken longest; its thread does the rest."""
        with self._changed:
            for stranger in self._strangers:
                with contextlib.suppress(OSError):
                    stranger.shutdown(socket.SHUT_RDWR)
                return

    def _read_from(self, connection: socket.socket, address: str) -> None:
        """Runs on a reader's thread: fills the peer's inbox, at most `slots` messages ahead of the receiver."""
        try:
            generation, source, is_stream = self._welcome(connection)
        except (OSError, EOFError):
            self._reject(connection, address)
            return
        if generation != self._generation:
            self._forget(connection)
            return
        try:
            if is_stream:
                stream = self._to_stream(connection, source)
                with self._changed:
                    self._accepted_streams[source] = stream
                    self._changed.notify_all()
                return
            with self._changed:
                queue = self._inbox.setdefault(source, deque())
            while True:
                header = Header.unpack(_read(connection, HEADER_BYTES))
                tensor = self._empty(header)
                _read_into(connection, _as_bytes(tensor))
                with self._changed:
                    self._changed.wait_for(lambda: len(queue) < self._slots or self._is_over())  # bounded: close, abort
                    if self._is_over():
                        return
                    queue.append((header, tensor))
                    self._changed.notify_all()
                del tensor
        except (OSError, EOFError, ProtocolError, RuntimeError) as error:  # RuntimeError: no memory for the message
            self._break(source, error)

    def _welcome(self, connection: socket.socket) -> tuple[int, int, bool]:
        """Lets the other end prove that it belongs to the run; returns its generation, its rank, and whether a stream
        follows. Raises OSError or EOFError."""
        self._keep(connection)
        connection.settimeout(HANDSHAKE_S)
        accept_handshake(connection, self._secret)
        with self._changed:
            self._strangers.pop(connection, None)
        connection.settimeout(None)
        generation, source, is_stream = _HELLO.unpack(_read(connection, _HELLO.size))
        return generation, source, is_stream

    def _reject(self, connection: socket.socket, address: str) -> None:
        """Closes a connection that has not proven that it belongs to the run; it breaks nothing."""
        self._forget(connection)
        if not self._is_over():
            with self._changed:
                self._rejections.add(address)
                text = self._rejections.report(time.monotonic())
            if text:
                self._log(text)

    def _empty(self, header: Header) -> Tensor:
        """Host memory for a message, pinned where there is an accelerator to copy it to."""
        if self._accelerator is None:
            return torch.empty(header.shape, dtype=header.dtype)
        return self._accelerator.empty_pinned(header.shape, header.dtype)

    def _is_over(self) -> bool:
        return self._closing or self._token.aborted

    def _start(self, target: Callable[..., None], *args: object) -> threading.Thread:
        def run() -> None:
            if self._accelerator is not None:
                self._accelerator.use()
            target(*args)

        thread = threading.Thread(target=run, daemon=True, name=f"links-{target.__name__}")
        thread.start()
        return thread

    def _keep(self, connection: socket.socket) -> None:
        """Lets the end of the generation close a new connection."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection, idle_s=LINK_IDLE_S, interval_s=10, num_probes=3)
        with self._changed:
            self._sockets.append(connection)
            ended = self._token.aborted
        if ended:
            self._end()

    def _forget(self, stranger: socket.socket) -> None:
        with self._changed:
            self._strangers.pop(stranger, None)
            if stranger in self._sockets:
                self._sockets.remove(stranger)
        stranger.close()

    def _break(self, peer: int, error: Exception) -> None:
        with self._changed:
            self._broken[peer] = str(error) or type(error).__name__
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            sockets, self._sockets = self._sockets, []
            streams, self._streams = self._streams, []
            rejected = self._rejections.report(time.monotonic(), is_last=True)
            self._changed.notify_all()
        for each in (*sockets, *streams):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for each in sockets:
            each.close()
        if rejected:
            self._log(rejected)


def _as_bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    _read_into(connection, memoryview(buffer))
    return bytes(buffer)


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        count = connection.recv_into(view)  # bounded: an abort closes it
        if count == 0:
            raise EOFError("closed by the peer")
        view = view[count:]
