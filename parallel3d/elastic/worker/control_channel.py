"""A worker's end of the control channel: the key-value store, records, stop and drain requests, membership frames.

The other end of its socket pair is the guardian, which relays to the coordinator. One thread reads, one writes, so that
a worker answers the coordinator while its main thread trains or hangs.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from parallel3d.elastic.frames import CHUNK_BYTES, PING_S, REPEATED_RECORDS, FrameReader, encode_frame
from parallel3d.elastic.gathered_values import decode_values
from parallel3d.elastic.protocol.membership import Address
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.elastic.worker.membership_client import FRAMES, MembershipClient
from parallel3d.elastic.worker.path_probe import likely_first, unreachable_ranks
from parallel3d.errors import ProtocolError
from parallel3d.monitor.uptime import MAX_REPEATED_RECORDS
from parallel3d.parallel.abort import POLL_S, AbortToken
from parallel3d.parallel.grid import PartId

FINISH_ACK_S = 5.0
READS = ("get", "get_all", "gather", "check", "compare")
"""Requests that may be made twice: of two answers the first counts."""


@dataclass
class _Response:
    request: dict[str, Any]
    token: AbortToken
    """Aborted once no call waits for it."""
    arrived: threading.Event = field(default_factory=threading.Event)
    header: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


class ControlChannel:
    """A worker's way to the coordinator. Methods may be called from any thread; `connect` and the store's calls wait.

    `hello`: its first frame, which each coordinator gets.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        rank: int,
        world_size: int,
        control_s: float = LaunchTimeouts.control_s,
        joins: bool = False,
        part: PartId | None = None,
        hello: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.rank = rank
        self.world_size = world_size
        self.token = AbortToken()
        """Aborted when the coordinator ends the run, or the connection to it breaks."""
        self.membership = MembershipClient(rank=rank, send=self._send, run_token=self.token, joins=joins, part=part)
        self.worker_status: Callable[[], dict[str, Any]] = lambda: {}
        """Returns this worker's status; called on the channel's thread."""
        self.on_dismissed: Callable[[], None] = lambda: None
        """Called on the channel's thread if the run does not need this worker, which still builds its part."""
        self._connection = connection
        self._control_s = control_s
        self._hello = dict(hello)
        self._connected = threading.Event()
        self._secret = b""
        self._lost_because = ""
        """Why the run can't go on without its coordinator."""
        self._stop = threading.Event()
        self._drain = threading.Event()
        self._drain_frame: dict[str, Any] | None = None
        """If this worker must leave, what it says about it to each coordinator."""
        self._finish_acked = threading.Event()
        self.lost_coordinator = False
        """Whether the coordinator is gone without having ended the run, and has no successor."""
        self._is_finishing = False
        self._kept_records: deque[dict[str, Any]] = deque(maxlen=MAX_REPEATED_RECORDS)
        """The newest published steps and evaluations: a coordinator may be lost before it has written them."""
        self._publishing = threading.Lock()
        """A new record must not come between those that are repeated: older ones would count as written."""
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._responses: dict[int | str, _Response] = {}
        self._ids = itertools.count()
        for work, name in ((self._read_until_closed, "control-reader"), (self._write_until_closed, "control-writer")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def connect(self, location: tuple[Address, bytes] | None = None) -> bytes:
        """Says hello and waits until the guardian has reached the coordinator; returns the run's secret.

        `location`: the coordinator's address and the secret, if this worker has found them. Raises GenerationEnded
        without a coordinator.
        """
        is_building = self.membership.is_building  # the coordinator that has asked it to may be gone
        state = {"membership_state": self.membership.membership_state()} if is_building else {}
        self._send({**self._hello, **state})
        if location is not None:
            address, secret = location
            self._send({"op": "located", "address": list(address), "secret": secret.hex()})
        while not self._connected.wait(POLL_S):
            self.token.check()
        return self._secret

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
        self._drain_frame = {"op": "announce_drain"}
        self._send(self._drain_frame)

    def set(self, key: str, value: bytes) -> None:
        """Stores `value` under `key` for every worker."""
        self._send({"op": "set", "key": key}, value)

    def get(self, key: str, token: AbortToken) -> bytes:
        """Returns the value of `key`, waiting until it is set; raises GenerationEnded when `token` is aborted."""
        return self._request({"op": "get", "key": key}, token).payload

    def get_all(self, keys: list[str], token: AbortToken) -> list[bytes]:
        """Returns the values of all `keys` in one exchange, waiting until each is set."""
        response = self._request({"op": "get_all", "keys": keys}, token)
        ends = list(accumulate(response.header["sizes"]))
        return [response.payload[end - size : end] for size, end in zip(response.header["sizes"], ends)]

    def gather(self, base: str, size: int, token: AbortToken) -> list[bytes]:
        """Returns what the `size` ranks of a group have set under `base` and their numbers, waiting until all have."""
        return decode_values(self._request({"op": "gather", "key": base, "size": size}, token, base).payload)

    def compare(self, key: str, num_workers: int, states: Mapping[int, str], token: AbortToken) -> int:
        """Says in which states numbered things are for this worker; waits until `num_workers` have said so under `key`,
        which is used once. Returns bits: n is set if not all that have said anything of thing n have said the same."""
        header = {"op": "compare", "key": key, "size": num_workers}
        response = self._request({**header, "numbers": list(states), "states": list(states.values())}, token, key)
        return int.from_bytes(response.payload, "little")

    def check(self, keys: list[str], token: AbortToken) -> bool:
        """True if all `keys` are set."""
        return bool(self._request({"op": "check", "keys": keys}, token).header["found"])

    def add(self, key: str, amount: int, token: AbortToken) -> int:
        """Adds to the counter `key`, which begins at 0; returns its new value."""
        return int(self._request({"op": "add", "key": key, "amount": amount}, token).header["value"])

    def publish(self, record: dict[str, Any]) -> None:
        """Passes a record to the run's reporter; never waits."""
        with self._publishing:
            if record.get("kind") in REPEATED_RECORDS:
                self._kept_records.append(record)
            self._send({"op": "publish", "record": record})

    def report_error(self, error: dict[str, Any]) -> None:
        """Reports why this worker is about to fail (`run_status.describe_error`)."""
        self._send({"op": "error", "error": error})

    def finish(self, exit_code: int) -> None:
        """Closes the channel once the coordinator has read everything sent before, at the latest after 5 s."""
        self._is_finishing = True
        self._send({"op": "finish", "exit_code": exit_code, "permission": self.membership.permission})
        self._finish_acked.wait(FINISH_ACK_S)
        self._close("this worker has finished")

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        self._outbox.put(encode_frame(header, payload))

    def _request(self, header: dict[str, Any], token: AbortToken, key: str = "") -> _Response:
        """Sends a request and waits for its answer; `key`: by which it is known where several get the same one."""
        number = key or next(self._ids)
        response = self._responses[number] = _Response(header if key else {**header, "id": number}, token)
        try:
            with self.token.waiting("the key-value store"):
                self._send(response.request)
                while not response.arrived.wait(POLL_S):
                    token.check()
                    self.token.check()
            return response
        finally:
            del self._responses[number]

    def _write_until_closed(self) -> None:
        while True:  # bounded: a daemon thread that is never joined
            try:
                self._connection.sendall(self._outbox.get())  # bounded: as above
            except OSError:  # the reader notices
                return

    def _read_until_closed(self) -> None:
        reason = self._read()
        self.lost_coordinator = not (self._is_finishing or self.token.aborted)
        self._close(self._lost_because or reason)

    def _read(self) -> str:
        """Handles the guardian's frames until the channel ends; returns why it did."""
        reader, silent_s, poll = FrameReader(), 0.0, select.poll()
        poll.register(self._connection, select.POLLIN)
        try:
            while True:
                if not poll.poll(PING_S * 1000):
                    silent_s += PING_S
                    if silent_s >= self._control_s:
                        return f"the guardian has been silent for {silent_s:.0f} s"
                    continue
                silent_s = 0.0
                if not (data := self._connection.recv(CHUNK_BYTES)):  # bounded: there is data, or the end
                    break
                for header, payload in reader.feed(data):
                    self._handle(header, payload)
        except (OSError, ProtocolError) as error:
            return f"the connection to the guardian broke ({error})"
        return "the guardian has closed the channel"

    def _lose_coordinator(self, reason: str, *, is_final: bool) -> None:
        """Ends the generation, whose fate only the lost coordinator knew; a new one may begin the next."""
        if is_final or self._is_finishing or self.token.aborted:
            self._lost_because = reason
            self._shut()
            return
        self.membership.leave_generation(reason)
        with self._publishing:
            self._send({**self._hello, "membership_state": self.membership.membership_state()})
            for record in self._kept_records:  # it knows which of them are in the run folder
                self._send({"op": "publish", "record": record})
        self._drain.clear()  # what the lost one has granted is void
        if self._drain_frame:
            self._send(self._drain_frame)
        for response in list(self._responses.values()):  # a worker that joins may ask the lost one what to begin with
            if response.request["op"] in READS and not response.token.aborted:
                self._send(response.request)

    def _handle(self, header: dict[str, Any], payload: bytes) -> None:
        match header.get("op"):
            case "response":
                if response := self._responses.get(header["id"]):
                    response.header, response.payload = header, payload
                    response.arrived.set()
            case "ping":
                pass
            case "connected":
                self._secret = bytes.fromhex(header["secret"])
                self._connected.set()
            case "coordinator_lost":
                self._lose_coordinator(header["reason"], is_final=header["is_final"])
            case "stop":
                self._stop.set()
            case "drain_request" if header.get("by_command"):  # the leader requests that change
                self._drain_frame = self._drain_frame or {"op": "announce_drain", "by_command": True}
            case "drain_request":
                self._drain_frame = {"op": "announce_drain"}
                self._drain.set()
            case "drain_withdrawn":
                self._drain_frame = None
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
                if header["op"] == "finish_run" and self.membership.is_building:
                    self.on_dismissed()
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
        self._shut()
        self._connection.close()

    def _shut(self) -> None:
        """Ends the connection for both threads: close() alone would leave the other one in its system call."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
