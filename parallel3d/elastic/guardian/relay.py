"""The relay: one connection with the coordinator for all guardians of a host, where a launcher starts a stub a rank.

A process below the protocol, the child of the stub of local rank 0 (p3d-relay). It connects to the coordinator, then
listens at a socket whose name follows from the run's secret, so that the host's guardians find it. Each guardian stays
one of its own: it says its own hello, and can be lost alone.

    up      what a turn has brought, guardians' frames and their workers', in one frame, in order
    down    one frame for several guardians, or workers of several

Coordinator and relay ping each other, and so do relay and guardians. When the coordinator is lost, the relay says so
and ends: its guardians look for a successor, and need no relay for that. When the relay is lost, they kill their
workers, since it is not known what of their words has arrived, report that to the coordinator, and stay.

The socket is abstract (Linux): it ends with the process, and is not seen from another network namespace.
"""

from __future__ import annotations

import hmac
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parallel3d.child_process import STOP_SIGNALS
from parallel3d.elastic.child_processes import ParentLink
from parallel3d.elastic.coordinator.connection import SocketConnection
from parallel3d.elastic.frame_schemas import check_frame
from parallel3d.elastic.frame_server import FrameServer
from parallel3d.elastic.frames import (
    encode_frame,
    encode_from_guardians,
    encode_to_workers,
    split_from_workers,
)
from parallel3d.elastic.guardian.coordinator_link import CoordinatorLink
from parallel3d.elastic.guardian.launcher_env import LauncherEnv
from parallel3d.elastic.guardian.link_events import LinkEvents
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.elastic.guardian.worker_channels import MAX_BATCH_BYTES, MAX_UNSENT_BYTES
from parallel3d.elastic.protocol.failover import GuardianInfo
from parallel3d.elastic.protocol.membership import Address
from parallel3d.elastic.settings import LaunchTimeouts

TURN_S = 0.25
IDLE_S = 60.0
"""For the first guardian; then the relay ends with the last one."""


def relay_address(secret: bytes, host: str) -> str:
    """Returns the name of the socket at which the relay of a host listens."""
    return "\0p3d-relay-" + hmac.digest(secret, b"relay|" + host.encode(), "sha256").hex()[:40]


def has_relay(env: LauncherEnv | None, world_size: int, from_workers: int) -> bool:
    """Whether this host's guardians share a connection: several of them in a run of at least `from_workers` workers on
    several hosts, on a system that has sockets with a name and no file."""
    if env is None or env.joins or env.local_world_size is None:
        return False
    is_one_of_several = 1 < env.local_world_size < env.world_size
    return is_one_of_several and world_size >= from_workers and sys.platform == "linux"


class GuardianServer(FrameServer):
    """The relay's connections with guardians: numbers them, and keeps what they send until it is taken."""

    called = "this host's relay"

    def __init__(self, listener: socket.socket, *, secret: bytes, control_s: float):
        super().__init__(listener, secret=secret, control_s=control_s)
        self.guardians: dict[int, SocketConnection] = {}
        """By number, in the order of their hellos."""
        self._numbers: dict[SocketConnection, int] = {}
        self._num_guardians = 0
        self._frames: list[tuple[int, int | None, bytes | memoryview]] = []
        self._lost: list[int] = []

    @property
    def had_guardians(self) -> bool:
        return self._num_guardians > 0

    def on_frame(self, connection: SocketConnection, header: dict[str, Any], payload: bytes) -> None:
        """Keeps a frame for the coordinator. Raises ProtocolError where it could not be taken apart there."""
        if connection not in self._numbers:
            check_frame("", header, payload)
            connection.hello = header
            self._numbers[connection] = self._num_guardians
            self.guardians[self._num_guardians] = connection
            self._num_guardians += 1
        number = self._numbers[connection]
        if header.get("op") == "from_workers":
            check_frame("guardian", header, payload)
            self._frames += [(number, rank, frame) for rank, frame in split_from_workers(header, payload)]
        else:
            self._frames.append((number, None, encode_frame(header, payload)))

    def on_close(self, connection: SocketConnection) -> None:
        number = self._numbers.pop(connection, None)
        if number is not None:
            del self.guardians[number]
            self._lost.append(number)

    def take_up(self) -> list[bytes]:
        """Returns the frames for the coordinator of what has come since; batches are of about a megabyte at most."""
        batches: list[bytes] = []
        start, num_bytes = 0, 0
        for place, (_, _, frame) in enumerate(self._frames):
            if place > start and num_bytes + len(frame) > MAX_BATCH_BYTES:
                batches.append(encode_from_guardians(self._frames[start:place]))
                start, num_bytes = place, 0
            num_bytes += len(frame)
        if self._frames:
            batches.append(encode_from_guardians(self._frames[start:]))
        batches += [encode_frame({"op": "guardian_lost", "guardian": number}) for number in self._lost]
        self._frames, self._lost = [], []
        return batches

    def pass_down(self, header: dict[str, Any], frame: bytes) -> None:
        """Passes one frame on to several guardians, or to workers of several."""
        if "ranks" not in header:
            for number in header["guardians"]:
                if number in self.guardians:
                    self.write(self.guardians[number], frame)
            return
        ranks: dict[int, list[int]] = {}
        for number, rank in zip(header["guardians"], header["ranks"]):
            ranks.setdefault(number, []).append(rank)
        for number, theirs in ranks.items():
            if number in self.guardians:
                self.write(self.guardians[number], encode_to_workers(theirs, frame), frame)

    def close_guardian(self, number: int) -> None:
        """Closes a guardian's connection, which the coordinator no longer wants."""
        if number in self.guardians:
            self.close_connection(self.guardians[number])


class Relay:
    """Relays until its last guardian is gone, or the coordinator; `host` is the one that it is for."""

    def __init__(
        self, address: Address, *, host: str, run_secret: RunSecret, stub: ParentLink, timeouts: LaunchTimeouts
    ):
        self._address = address
        self._host = host
        self._run_secret = run_secret
        self._stub = stub
        self._timeouts = timeouts
        self._selector = selectors.DefaultSelector()
        self._server: GuardianServer | None = None
        self._is_watched = False
        """Whether guardians are read: not while the coordinator is behind."""
        self.is_over = False
        self._deadline_s = float("inf")
        self._link = CoordinatorLink(
            self._selector,
            own_info=GuardianInfo(ranks=(), host=host, address=address),
            run_secret=run_secret,
            stub=stub,
            timeouts=timeouts,
            events=LinkEvents(
                greet=lambda: {"op": "hello", "role": "relay"},
                on_welcome=self._listen,
                on_frame=self._on_frame,
                on_lost=lambda: None,
                on_relay_lost=lambda: None,
                on_end=self._on_end,
            ),
        )

    @property
    def is_serving(self) -> bool:
        """Whether guardians may connect."""
        return self._server is not None

    def serve(self) -> None:
        try:
            self.begin()
            while not self.is_over:
                self._stub.beat()
                self.turn(TURN_S)
        finally:
            self.close()

    def begin(self) -> None:
        """Begins to connect."""
        self._link.find(self._address)

    def turn(self, timeout_s: float) -> None:
        """Waits for something to do, at most `timeout_s`, and does it."""
        self._link.turn()
        for key, _ in self._selector.select(timeout_s):
            key.data()
        if (server := self._server) is None:
            return
        if self._link.num_unsent_bytes <= MAX_UNSENT_BYTES:
            server.poll(0.0)
        for frame in server.take_up():
            self._link.send_encoded(frame)
        self._watch(server, self._link.num_unsent_bytes <= MAX_UNSENT_BYTES)
        if not server.guardians and (server.had_guardians or time.monotonic() > self._deadline_s):
            self.is_over = True
        if rejected := server.rejections.report(time.monotonic(), is_last=self.is_over):
            print(rejected, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Sends what is still to be sent, and closes all."""
        self._link.close()
        if self._server is not None:
            self._server.close()
        self._selector.close()

    def _watch(self, server: GuardianServer, is_due: bool) -> None:
        if is_due != self._is_watched:
            self._is_watched = is_due
            if is_due:
                self._selector.register(server, selectors.EVENT_READ, _wake)
            else:
                self._selector.unregister(server)

    def _listen(self) -> None:
        """Begins to serve guardians: the coordinator has been reached, so the secret is right."""
        secret = self._run_secret.read()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(relay_address(secret, self._host))
        except OSError:  # there is one: of a launcher that has started this host's ranks as two
            listener.close()
            self.is_over = True
            return
        listener.listen(1024)
        self._deadline_s = time.monotonic() + IDLE_S
        self._server = GuardianServer(listener, secret=secret, control_s=self._timeouts.control_s)

    def _on_frame(self, header: dict[str, Any], payload: bytes) -> None:
        assert self._server is not None
        if header["op"] == "to_guardians":
            self._server.pass_down(header, payload)
        elif header["op"] == "close_guardian":
            self._server.close_guardian(header["guardian"])

    def _on_end(self, why: str, speaks: bool) -> None:
        """The coordinator is gone, or was never reached: the guardians look for it, and say what they find."""
        self.is_over = True
        if self._server is not None:
            for guardian in list(self._server.guardians.values()):
                self._server.write(guardian, encode_frame({"op": "coordinator_lost"}))


def _wake() -> None:
    """Each turn polls the guardians' connections."""


@dataclass(frozen=True, kw_only=True)
class RelaySpec:
    """The arguments of the relay's process, known before it is forked."""

    host: str
    make_secret: Callable[..., RunSecret]
    timeouts: LaunchTimeouts


def run_relay_process(spec: RelaySpec, link: ParentLink, request: dict[str, Any]) -> int:
    """The main function of the relay's process; `request`: the guardian's, once it knows the coordinator's address."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the stub passes them on to the guardians
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    secret = spec.make_secret(value=bytes.fromhex(request["secret"]) if "secret" in request else None)
    host, port = request["address"]
    Relay((host, port), host=spec.host, run_secret=secret, stub=link, timeouts=spec.timeouts).serve()
    return 0
