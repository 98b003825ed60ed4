"""A worker's end of the control channel: the key-value store, records, stop and drain requests, membership frames.

One thread reads, one writes, so that a worker answers the coordinator while its main thread trains or hangs. When the
coordinator is lost, both go on with the connection to its successor.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from parallel3d.elastic.frames import CHUNK_BYTES, PING_S, FrameReader, encode_frame
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.elastic.worker.membership_client import FRAMES, MembershipClient
from parallel3d.elastic.worker.path_probe import likely_first, unreachable_ranks
from parallel3d.errors import ProtocolError
from parallel3d.parallel.abort import POLL_S, AbortToken

FINISH_ACK_S = 5.0
MAX_KEPT_RECORDS = 4096
"""More than a silent coordinator can miss: 30 s of steps of 10 ms."""


@dataclass
class _Response:
    arrived: threading.Event = field(default_factory=threading.Event)
    header: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


Reconnect = Callable[[dict[str, Any]], socket.socket | None]
"""Connects to the coordinator's successor, given this worker's membership state; returns None if there is none."""


class ControlChannel:
    """A worker's connection to the coordinator. Methods may be called from any thread; only the store's calls wait."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        rank: int,
        world_size: int,
        control_s: float = LaunchTimeouts.control_s,
        reconnect: Reconnect = lambda membership_state: None,
    ):
        self.rank = rank
        self.world_size = world_size
        self.token = AbortToken()
        """Aborted when the coordinator ends the run, or the connection to it breaks."""
        self.membership = MembershipClient(rank=rank, send=self._send, run_token=self.token)
        self.worker_status: Callable[[], dict[str, Any]] = lambda: {}
        """Returns this worker's status; called on the channel's thread."""
        self._connection = connection
        self._control_s = control_s
        self._reconnect = reconnect
        self._replaced = threading.Condition()
        """Guards `_connection`; notified when it is replaced or closed."""
        self._stop = threading.Event()
        self._drain = threading.Event()
        self._finish_acked = threading.Event()
        self.lost_coordinator = False
        """Whether the coordinator is gone without having ended the run, and has no successor."""
        self._is_finishing = self._closed = False
        self._kept_records: deque[dict[str, Any]] = deque(maxlen=MAX_KEPT_RECORDS)
        """The newest published steps and evaluations: a coordinator may be lost before it has written them."""
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._responses: dict[int, _Response] = {}
        self._ids = itertools.count()
        for work, name in ((self._read_until_closed, "control-reader"), (self._write_until_closed, "control-writer")):
            threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def stop_requested(self) -> bool:
        """True once the run is to stop after its step. Ranks may see it at different steps."""
        return self._stop.is_set()

    @property
    def drain_requested(self) -> bool:
        """True once this worker should request a change at the next step boundary and leave with it."""
        return self._drain.is_set()

    def announce_drain(self) -> None:
        """Announces that this worker must leave soon; safe within a signal handler."""
        self._send({"op": "announce_drain"})

    def set(self, key: str, value: bytes) -> None:
        """Stores `value` under `key` for every worker."""
        self._send({"op": "set", "key": key}, value)

    def get(self, key: str, token: AbortToken) -> bytes:
        """Returns the value of `key`, waiting until it is set; raises GenerationEnded when `token` is aborted."""
        return self._request({"op": "get", "key": key}, token).payload

    def get_all(self, keys: list[str], token: AbortToken, *, column: list[int] | None = None) -> list[bytes]:
        """Returns the values of all `keys` in one exchange, waiting until each is set; `column` as in kv_store.py."""
        response = self._request({"op": "get_all", "keys": keys, "column": column}, token)
        ends = list(accumulate(response.header["sizes"]))
        return [response.payload[end - size : end] for size, end in zip(response.header["sizes"], ends)]

    def check(self, keys: list[str], token: AbortToken) -> bool:
        """True if all `keys` are set."""
        return bool(self._request({"op": "check", "keys": keys}, token).header["found"])

    def add(self, key: str, amount: int, token: AbortToken) -> int:
        """Adds to the counter `key`, which begins at 0; returns its new value."""
        return int(self._request({"op": "add", "key": key, "amount": amount}, token).header["value"])

    def publish(self, record: dict[str, Any]) -> None:
        """Passes a record to the run's reporter; never waits."""
        if record.get("kind") in ("step", "evaluation"):
            self._kept_records.append(record)
        self._send({"op": "publish", "record": record})

    def report_error(self, error: dict[str, Any]) -> None:
        """Reports why this worker is about to fail (`run_status.describe_error`)."""
        self._send({"op": "error", "error": error})

    def finish(self, exit_code: int) -> None:
        """Closes the channel once the coordinator has read everything sent before, at the latest after 5 s."""
        self._is_finishing = True
        self._send({"op": "finish", "exit_code": exit_code})
        self._finish_acked.wait(FINISH_ACK_S)
        self._close("this worker has finished")

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self._outbox.put(encode_frame(header, payload))

    def _request(self, header: dict[str, Any], token: AbortToken) -> _Response:
        number, response = next(self._ids), _Response()
        self._responses[number] = response
        try:
            with self.token.waiting("the key-value store"):
                self._send({**header, "id": number})
                while not response.arrived.wait(POLL_S):
                    token.check()
                    self.token.check()
            return response
        finally:
            del self._responses[number]

    def _write_until_closed(self) -> None:
        while self._write(self._outbox.get()):  # bounded: a daemon thread that is never joined
            pass

    def _write(self, frame: bytes) -> bool:
        """Sends a frame, over the next connection if this one breaks; False if there is none."""
        while not self._closed:
            connection = self._connection
            try:
                connection.sendall(frame)
                return True
            except OSError:
                _shut(connection)  # so that the reader notices
                self._await_replacement(connection)
        return False

    def _await_replacement(self, connection: socket.socket) -> None:
        with self._replaced:
            self._replaced.wait_for(  # bounded: the reader finds another one, or closes
                lambda: self._closed or self._connection is not connection
            )

    def _read_until_closed(self) -> None:
        while not self._closed:
            reason = self._read(self._connection)
            if not self._reconnect_to_new_coordinator(reason):
                self.lost_coordinator = not (self._is_finishing or self.token.aborted)
                self._close(reason)

    def _read(self, connection: socket.socket) -> str:
        """Handles the frames of a connection until it ends; returns why it did."""
        reader, silent_s, poll = FrameReader(), 0.0, select.poll()
        poll.register(connection, select.POLLIN)
        try:
            while True:
                if not poll.poll(PING_S * 1000):
                    silent_s += PING_S
                    if silent_s >= self._control_s:
                        _shut(connection)
                        return f"the coordinator has been silent for {silent_s:.0f} s"
                    continue
                silent_s = 0.0
                if not (data := connection.recv(CHUNK_BYTES)):  # bounded: there is data, or the end
                    break
                for header, payload in reader.feed(data):
                    self._handle(header, payload)
        except (OSError, ProtocolError) as error:
            return f"the connection to the coordinator broke ({error})"
        return "the coordinator is gone"

    def _reconnect_to_new_coordinator(self, reason: str) -> bool:
        """Ends the generation, whose fate only the lost coordinator knew; a new one may begin the next."""
        if self._is_finishing or self.token.aborted:
            return False
        self.membership.leave_generation(reason)
        connection = self._reconnect(self.membership.membership_state())
        if connection is None:
            return False
        with self._replaced:
            self._connection.close()
            self._connection = connection
            self._replaced.notify_all()
        for record in list(self._kept_records):  # it knows which of them are in the run folder
            self._send({"op": "publish", "record": record})
        return True

    def _handle(self, header: dict[str, Any], payload: bytes) -> None:
        match header.get("op"):
            case "response":
                if response := self._responses.get(header["id"]):
                    response.header, response.payload = header, payload
                    response.arrived.set()
            case "ping":
                pass
            case "stop":
                self._stop.set()
            case "drain_request":
                self._drain.set()
            case "abort":
                self.token.abort(header["reason"])
            case "request_status":
                self._send({"op": "worker_status", "status": self.worker_status()})
            case "probe":
                threading.Thread(target=self._probe, args=(header,), name="path-probe", daemon=True).start()
            case "finish_ack":
                self._finish_acked.set()
            case op if op in FRAMES:
                self.membership.handle(header, payload)
            case op:
                raise ProtocolError(f"the coordinator sent {op!r}")

    def _probe(self, request: dict[str, Any]) -> None:
        """Answers which of the ranks that this worker waits for can't be reached; all members if it names none."""
        status, addresses = self.worker_status(), self.membership.addresses()
        peers = (status["peers"] or list(addresses)) if status.get("is_waiting") else []
        silent = unreachable_ranks(likely_first(self.rank, peers), addresses, timeout_s=request["timeout_s"])
        self._send({"op": "probed", "round": request["round"], "unreachable": silent})

    def _close(self, reason: str) -> None:
        self._finish_acked.set()
        self.token.abort(reason)
        with self._replaced:
            self._closed = True
            self._replaced.notify_all()
        _shut(self._connection)
        self._connection.close()


def _shut(connection: socket.socket) -> None:
    """Ends a connection for both threads: close() alone would leave the other one in its system call."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
