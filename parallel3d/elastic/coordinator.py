"""The coordinator: the server of the control channel, and the one that decides when and how the run is over.

It is a thread of the launcher's process (of rank 0's guardian under torchrun), never of a worker. One thread owns all
its state and waits in one selector, so there are no locks; records go on to the report's own thread, so that a slow
disk never delays an abort.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parallel3d.elastic.control import CHUNK_BYTES, FrameReader, encode_frame
from parallel3d.elastic.verdict import Outcome, RunBook
from parallel3d.errors import LaunchError, ProtocolError

TICK_S = 0.25
FAREWELL_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long each wait of the launching side may last, in seconds."""

    start_s: float = 600.0
    """From the coordinator's start until every worker has connected; also the longest look-up of its address."""
    connect_s: float = 60.0
    """Until the coordinator accepts a connection."""
    abort_grace_s: float = 3.0
    """From the end of the run to SIGKILL for workers that have not left."""
    stop_grace_s: float = 15.0
    """From a stop asked for (Ctrl-C, SIGTERM) to SIGKILL."""


def open_listener(host: str, port: int) -> socket.socket:
    """The coordinator's socket; port 0 takes a free one. Raises LaunchError when the port is taken."""
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise LaunchError(
            f"can't listen at port {port} ({error}): choose another one (--master_port of your launcher)"
        ) from None


@dataclass(eq=False)
class _Peer:
    """One connection: a worker's (`rank`) or a guardian's (`guarded`), once it has said hello."""

    socket: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    outbox: bytearray = field(default_factory=bytearray)
    rank: int | None = None
    guarded: tuple[int, ...] = ()


class Coordinator:
    """Serves until every worker has ended and every guardian knows the outcome."""

    def __init__(
        self, listener: socket.socket, *, world_size: int, emit: Callable[[dict[str, Any]], None], limits: Limits
    ):
        self._listener = listener
        self._emit = emit
        self._limits = limits
        self._book = RunBook(world_size)
        self._aborting = False
        self._values: dict[str, bytes] = {}
        self._waiting: defaultdict[str, list[tuple[_Peer, int]]] = defaultdict(list)
        self._peers: set[_Peer] = set()
        self._selector = selectors.DefaultSelector()
        self._start_deadline = time.monotonic() + limits.start_s
        self._thread = threading.Thread(target=self._serve, name="coordinator", daemon=True)

    def start(self) -> None:
        """Starts to serve; call it after the forks, since a thread does not survive one."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()

    def join(self, timeout_s: float) -> Outcome:
        """The outcome, once the run is over; what is known of it when that takes longer than `timeout_s`."""
        self._thread.join(timeout_s)
        return self._book.outcome()

    def _serve(self) -> None:
        try:
            while not self._book.over:
                self._turn()
                self._miss_latecomers()
            self._tell_guardians({"op": "over", "exit_code": self._book.outcome().exit_code})
            deadline = time.monotonic() + FAREWELL_S
            while self._peers and time.monotonic() < deadline:
                self._turn()
        finally:  # also after a defect in here: a closed connection ends the run, an open one would hang it
            self._listener.close()
            for peer in self._peers:
                peer.socket.close()

    def _turn(self) -> None:
        for key, events in self._selector.select(TICK_S):
            if key.data is None:
                self._accept()
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ and key.data in self._peers:
                self._read(key.data)

    def _miss_latecomers(self) -> None:
        if time.monotonic() > self._start_deadline:
            missing = [rank for rank, worker in self._book.workers.items() if not (worker.host or worker.ended)]
            self._book.note_never_came(missing, timeout_s=self._limits.start_s)
            self._start_deadline = float("inf")
            self._abort_after_failure()

    # Connections

    def _accept(self) -> None:
        connection, _ = self._listener.accept()  # bounded: the selector says that someone is there
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(connection)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(CHUNK_BYTES)  # bounded: does not block
            for header, payload in peer.reader.feed(data):
                self._handle(peer, header, payload)
        except BlockingIOError:
            return
        except (OSError, ProtocolError, KeyError, TypeError, ValueError):  # a stranger, or one that has died
            data = b""
        if not data:
            self._drop(peer)

    def _send(self, peer: _Peer, header: dict[str, Any], payload: bytes = b"") -> None:
        peer.outbox += encode_frame(header, payload)
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        try:
            del peer.outbox[: peer.socket.send(peer.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        writing = selectors.EVENT_WRITE if peer.outbox else 0
        self._selector.modify(peer.socket, selectors.EVENT_READ | writing, peer)

    def _drop(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.guarded:
            self._book.note_lost_guardian(peer.guarded)
            self._abort_after_failure()

    # What they say

    def _handle(self, peer: _Peer, header: dict[str, Any], payload: bytes) -> None:
        op = header["op"]
        if op == "hello":
            self._greet(peer, header)
        elif peer.guarded:
            self._handle_guardian(op, header)
        elif peer.rank is not None:
            self._handle_worker(peer, peer.rank, header, payload)
        else:
            raise ProtocolError(f"{op!r} before hello")

    def _greet(self, peer: _Peer, header: dict[str, Any]) -> None:
        ranks = tuple(header["ranks"])
        if not ranks or any(rank not in self._book.workers for rank in ranks):
            raise ProtocolError(f"hello from ranks {ranks}")
        if header["role"] == "guardian":
            peer.guarded = ranks
        else:
            (peer.rank,) = ranks
            self._book.note_hello(peer.rank, host=header["host"], log=header["log"])
        if self._book.stop_signal is not None:  # whoever comes late learns what the others have been told
            self._send(peer, {"op": "stop"})
        if self._aborting:
            self._send(peer, self._abort_frame(self._limits.abort_grace_s))

    def _handle_guardian(self, op: str, header: dict[str, Any]) -> None:
        if op == "ended":
            self._book.note_end(header["rank"], exit_code=header["exit_code"], by_guardian=header["by_guardian"])
            self._abort_after_failure()
        elif op == "stop":
            self._stop(header["signal"], at_once=header["at_once"])

    def _handle_worker(self, peer: _Peer, rank: int, header: dict[str, Any], payload: bytes) -> None:
        match header["op"]:
            case "publish":
                self._book.note_record(rank, header["record"])
                self._emit(header["record"])
            case "set":
                self._set(header["key"], payload)
            case "get":
                self._waiting[header["key"]].append((peer, header["id"]))
                self._answer_waiting(header["key"])
            case "check":
                found = all(key in self._values for key in header["keys"])
                self._send(peer, {"op": "answer", "id": header["id"], "found": found})
            case "add":
                value = int(self._values.get(header["key"], b"0")) + int(header["amount"])
                self._set(header["key"], str(value).encode())
                self._send(peer, {"op": "answer", "id": header["id"], "value": value})
            case "error":
                self._book.note_error(rank, header["error"])
                self._abort_after_failure()
            case "finish":
                self._send(peer, {"op": "bye"})
            case op:
                raise ProtocolError(f"rank {rank} sent {op!r}")

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._answer_waiting(key)

    def _answer_waiting(self, key: str) -> None:
        if key in self._values:
            for peer, number in self._waiting.pop(key, []):
                self._send(peer, {"op": "answer", "id": number}, self._values[key])

    # What follows

    def _stop(self, signal_number: int, *, at_once: bool) -> None:
        if self._book.stop_signal is None and not self._aborting:
            self._book.note_stop(signal_number)
            self._emit({"kind": "notice", "text": "stopping after this step; press Ctrl-C again to stop at once"})
            self._tell_all({"op": "stop"})
        if at_once:
            self._aborting = True
            self._tell_all(self._abort_frame(0.0))

    def _abort_after_failure(self) -> None:
        """In this version the loss of a worker ends the run: everybody is told, once."""
        if self._book.failures and not self._aborting:
            self._aborting = True
            self._emit({"event": "failure", "text": self._book.failures[0].message})
            self._tell_all(self._abort_frame(self._limits.abort_grace_s))

    def _abort_frame(self, grace_s: float) -> dict[str, Any]:
        reason = self._book.failures[0].message if self._book.failures else "stopped at once"
        return {"op": "abort", "reason": reason, "grace_s": grace_s}

    def _tell_all(self, header: dict[str, Any]) -> None:
        for peer in list(self._peers):
            if peer.guarded or peer.rank is not None:
                self._send(peer, header)

    def _tell_guardians(self, header: dict[str, Any]) -> None:
        for peer in list(self._peers):
            if peer.guarded:
                self._send(peer, header)
