"""The coordinator's connections to workers and guardians.

Workers speak through their guardians' connections (or over their own, which only tests use). On large runs guardians
speak through their host's relay (guardian/relay.py). What is above the server does not see it: a frame for many goes to
each relay once, and each of its guardians can be lost alone.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from parallel3d.elastic.coordinator.connection import (
    Connection,
    RelayedConnection,
    SocketConnection,
    TunnelledConnection,
)
from parallel3d.elastic.frame_schemas import check_frame
from parallel3d.elastic.frame_server import FrameServer
from parallel3d.elastic.frames import (
    decode_part,
    encode_frame,
    encode_to_guardians,
    encode_to_their_workers,
    encode_to_workers,
    split_from_guardians,
    split_from_workers,
)
from parallel3d.errors import ProtocolError

MAX_TUNNELLED = 1024
"""Guardians that speak through one relay: a host has as many as devices."""

REPEATED_OPS = ("confirm", "suspect", "finish_generation")
"""Frames that most workers send alike at a change: thousands of equal ones are read and checked once. They carry no
payload."""

OnMessage = Callable[[Connection, dict[str, Any], bytes], None]
"""Handles one frame."""


class ConnectionServer(FrameServer):
    """Accepts connections, passes frames to `on_message` and lost connections to `on_lost`."""

    called = "the coordinator"

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: bytes,
        control_s: float,
        on_message: OnMessage,
        on_lost: Callable[[Connection], None],
    ):
        super().__init__(listener, secret=secret, control_s=control_s)
        self.workers: dict[int, Connection] = {}
        """The connected ones, by rank."""
        self._guardians: dict[tuple[int, ...], Connection] = {}
        """The newest of each guardian, by the ranks that it began with."""
        self._repeated: tuple[bytes, dict[str, Any]] | None = None
        """The last frame of REPEATED_OPS and its header, checked."""
        self._on_message = on_message
        self._on_lost = on_lost

    def add_worker(self, connection: Connection, rank: int) -> None:
        connection.rank = rank
        self.workers[rank] = connection

    def replace_guardian(self, connection: Connection, ranks: tuple[int, ...]) -> None:
        """Closes an earlier connection of the guardian that began with `ranks`. One that has lost its coordinator
        connects again; after a cut shorter than this end's patience, its earlier connection still looks alive here."""
        earlier = self._guardians.get(ranks)
        self._guardians[ranks] = connection
        if earlier is not None:
            self._refuse(earlier, ProtocolError("it has connected again"))

    def end_worker(self, rank: int) -> None:
        """Forgets a worker whose guardian has reported its exit: nothing is sent to it any more."""
        worker = self.workers.get(rank)
        if isinstance(worker, RelayedConnection):
            self._forget(worker)

    def guardians(self) -> list[Connection]:
        """Those that have said hello, through relays too."""
        direct = [connection for connection in self.connections if connection.guarded_ranks]
        tunnelled = [each for relay in self.connections for each in relay.tunnelled.values()]
        return [*direct, *(each for each in tunnelled if each.is_open and each.guarded_ranks)]

    # --- sending --------------------------------------------------------------------------------------------------

    def send(self, connection: Connection, header: dict[str, Any], payload: bytes = b"") -> None:
        """Sends a frame without waiting: what the peer does not take now follows in later polls."""
        self._send_to_all([connection], encode_frame(header, payload))

    def send_to_workers(self, ranks: Iterable[int], header: dict[str, Any], payload: bytes = b"") -> None:
        """Sends a frame to those of `ranks` that are connected."""
        workers = self.workers
        if connections := [workers[rank] for rank in ranks if rank in workers]:
            self._send_to_all(connections, encode_frame(header, payload))

    def send_to_all(self, connections: Iterable[Connection], header: dict[str, Any], payload: bytes = b"") -> None:
        self._send_to_all(connections, encode_frame(header, payload))

    def send_to_guardians(self, header: dict[str, Any]) -> None:
        self._send_to_all(self.guardians(), encode_frame(header))

    def broadcast(self, header: dict[str, Any]) -> None:
        """Sends a frame to all workers and guardians."""
        self._send_to_all([*self.guardians(), *self.workers.values()], encode_frame(header))

    def _send_to_all(self, connections: Iterable[Connection], frame: bytes) -> None:
        """Sends a frame: once to the guardians, and once to the workers, at the other end of a socket."""
        ranks: defaultdict[SocketConnection, list[int]] = defaultdict(list)
        numbers: defaultdict[SocketConnection, list[int]] = defaultdict(list)
        receivers: defaultdict[SocketConnection, list[tuple[int, int]]] = defaultdict(list)
        for connection in connections:
            if not connection.is_open:
                continue
            if isinstance(connection, RelayedConnection):
                guardian = connection.guardian
                if isinstance(guardian, SocketConnection):
                    ranks[guardian].append(connection.relay_rank)
                else:
                    receivers[guardian.relay].append((guardian.number, connection.relay_rank))
            elif isinstance(connection, SocketConnection):
                self.write(connection, frame)
            elif isinstance(connection, TunnelledConnection):
                numbers[connection.relay].append(connection.number)
        for relay, their_numbers in numbers.items():
            self.write(relay, encode_to_guardians(their_numbers, frame), frame)
        for guardian, their_ranks in ranks.items():
            self.write(guardian, encode_to_workers(their_ranks, frame), frame)
        for relay, workers in receivers.items():
            self.write(relay, encode_to_their_workers(workers, frame), frame)

    # --- receiving ------------------------------------------------------------------------------------------------

    def on_frame(self, connection: SocketConnection, header: dict[str, Any], payload: bytes) -> None:
        """Passes on a frame of a socket, or the frames that it carries."""
        match connection.role, header.get("op"):
            case _, "from_workers":
                check_frame(connection.role, header, payload)
                self._dispatch_relayed(connection, header, payload)
            case "relay", "from_guardians":
                check_frame(connection.role, header, payload)
                self._dispatch_tunnelled(connection, header, payload)
            case "relay", "guardian_lost":
                check_frame(connection.role, header, payload)
                self._lose_tunnelled(connection, header["guardian"])
            case "", "hello" if header.get("role") == "relay":
                check_frame(connection.role, header, payload)
                connection.hello = header
                self.send(connection, {"op": "welcome"})
            case _:
                self.dispatch(connection, header, payload)

    def dispatch(
        self, connection: Connection, header: dict[str, Any], payload: bytes, *, is_checked: bool = False
    ) -> None:
        """Passes a frame on. One that the protocol does not allow closes its connection alone."""
        if connection.is_open:
            try:
                if not is_checked:
                    check_frame(connection.role, header, payload)
                if header["op"] == "hello":
                    connection.check_hello(header)
                self._on_message(connection, header, payload)
            except ProtocolError as error:
                self._refuse(connection, error)

    def _dispatch_relayed(
        self, guardian: SocketConnection | TunnelledConnection, header: dict[str, Any], payload: bytes
    ) -> None:
        """Passes on the frames of a guardian's workers."""
        for rank, frame in split_from_workers(header, payload):
            self._dispatch_worker(guardian, rank, frame)

    def _dispatch_worker(self, guardian: SocketConnection | TunnelledConnection, rank: int, frame: memoryview) -> None:
        if rank not in guardian.relayed:
            if rank not in guardian.guarded_ranks:
                raise ProtocolError(f"a frame of rank {rank} from the guardian of ranks {guardian.guarded_ranks}")
            guardian.relayed[rank] = RelayedConnection(guardian=guardian, relay_rank=rank)
        worker = guardian.relayed[rank]
        if self._repeated is not None and frame == self._repeated[0]:
            self.dispatch(worker, dict(self._repeated[1]), b"", is_checked=True)
            return
        header, payload = decode_part(frame, f"rank {rank}")
        self.dispatch(worker, header, payload)
        if worker.is_open and header["op"] in REPEATED_OPS:
            self._repeated = bytes(frame), dict(header)

    def _dispatch_tunnelled(self, relay: SocketConnection, header: dict[str, Any], payload: bytes) -> None:
        """Passes on the frames of a relay's guardians, and of their workers. One of a wrong form costs its guardian."""
        for number, rank, frame in split_from_guardians(header, payload):
            guardian = relay.tunnelled.get(number) or self._add_tunnelled(relay, number)
            if not (guardian.is_open and relay.is_open):
                continue
            try:
                if rank is not None:
                    self._dispatch_worker(guardian, rank, frame)
                else:
                    inner_header, inner_payload = decode_part(frame, f"guardian {number}")
                    if inner_header.get("op") == "from_workers":
                        raise ProtocolError("a batch within a batch")
                    self.dispatch(guardian, inner_header, inner_payload)
            except ProtocolError as error:
                self._refuse(guardian, error)

    def _add_tunnelled(self, relay: SocketConnection, number: int) -> TunnelledConnection:
        """Returns the connection of a guardian that speaks for the first time. Raises ProtocolError."""
        if number != relay.num_tunnelled or len(relay.tunnelled) >= MAX_TUNNELLED:
            raise ProtocolError(f"a frame of guardian {number} after {relay.num_tunnelled} guardians")
        relay.num_tunnelled += 1
        relay.tunnelled[number] = TunnelledConnection(relay=relay, number=number)
        return relay.tunnelled[number]

    # --- losing ---------------------------------------------------------------------------------------------------

    def _lose_tunnelled(self, relay: SocketConnection, number: int) -> None:
        """Handles the end of a guardian's connection with its relay. Raises ProtocolError."""
        guardian = relay.tunnelled.pop(number, None)
        if guardian is None:
            raise ProtocolError(f"guardian {number} is lost, which was not there")
        if guardian.is_open:
            self._close_guardian(guardian)

    def _refuse(self, connection: Connection, error: ProtocolError) -> None:
        """Closes a connection with a worker, a guardian or anybody else, because of what it has sent."""
        if not connection.is_open:
            return
        connection.lost_because = str(error)
        if isinstance(connection, SocketConnection):
            self.close_connection(connection)
        elif isinstance(connection, TunnelledConnection):
            close = {"op": "close_guardian", "guardian": connection.number}
            self.write(connection.relay, encode_frame(close))
            if connection.is_open:
                self._close_guardian(connection)
        elif isinstance(connection, RelayedConnection):
            self._forget(connection)
            self.send(connection.guardian, {"op": "close_worker", "rank": connection.relay_rank})
            self._on_lost(connection)

    def on_close(self, connection: SocketConnection) -> None:
        """Handles the end of a socket: with a guardian's its workers are out of reach, with a relay's its guardians."""
        tunnelled = [each for each in connection.tunnelled.values() if each.is_open]
        lost: list[SocketConnection | TunnelledConnection] = [connection, *tunnelled]
        for guardian in lost:
            self._forget_guardian(guardian)
        for guardian in lost:
            self._on_lost(guardian)

    def _close_guardian(self, guardian: TunnelledConnection) -> None:
        self._forget_guardian(guardian)
        self._on_lost(guardian)

    def _forget_guardian(self, guardian: SocketConnection | TunnelledConnection) -> None:
        self._forget(guardian)
        for worker in guardian.relayed.values():
            self._forget(worker)

    def _forget(self, connection: Connection) -> None:
        connection.is_open = False
        if connection.rank is not None and self.workers.get(connection.rank) is connection:
            del self.workers[connection.rank]
