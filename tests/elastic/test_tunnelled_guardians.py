"""Guardians that reach the coordinator's server through a relay: what it sees is what it would see without one."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel3d.elastic.coordinator.connection import Connection
from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.kv_store import KeyValueStore
from parallel3d.elastic.coordinator.listener import open_listener
from parallel3d.elastic.frames import FrameReader, encode_frame, encode_from_guardians, encode_from_workers
from parallel3d.elastic.guardian.relay import Relay, relay_address
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.handshake import ConnectingHandshake, new_secret

HOST = "node7"
NUM_GUARDIANS = 3
Event = tuple[Any, ...]


class FakeStub:
    def send(self, header: dict[str, Any]) -> None:
        pass

    def beat(self) -> None:
        pass


class Server:
    """A coordinator's connections: it welcomes, and keeps what it sees."""

    def __init__(self, secret: bytes):
        self.listener = open_listener("127.0.0.1", 0)
        self.events: list[Event] = []
        self.server = ConnectionServer(
            self.listener, secret=secret, control_s=30.0, on_message=self._on_message, on_lost=self._on_lost
        )

    def _on_message(self, connection: Connection, header: dict[str, Any], payload: bytes) -> None:
        if header["op"] == "hello":
            connection.hello = header
            if header["role"] == "worker":
                self.server.add_worker(connection, header["ranks"][0])
            else:
                connection.guarded_ranks = tuple(header["ranks"])
                self.server.send(connection, {"op": "welcome"})
        self.events.append((connection.role, connection.rank, connection.guarded_ranks, header, payload))

    def _on_lost(self, connection: Connection) -> None:
        if connection.role != "relay":
            self.events.append(("lost", connection.rank, connection.guarded_ranks, connection.lost_because))

    def of(self, rank: int) -> list[Event]:
        """What it has seen of a guardian and its worker."""
        return [event for event in self.events if event[1] == rank or event[2] == (rank,)]


class Guardian:
    """A guardian's end of a connection, in the same thread as the servers."""

    def __init__(self, world: World, rank: int):
        self.rank = rank
        self.socket = world.connect()
        self.frames: list[tuple[dict[str, Any], bytes]] = []
        self.is_closed = False
        self._reader = FrameReader()
        self.send({"op": "hello", "role": "guardian", "ranks": [rank], "host": HOST, "address": ["127.0.0.1", 1]})

    def send(self, header: dict[str, Any]) -> None:
        self.socket.sendall(encode_frame(header))

    def send_of_worker(self, *headers: dict[str, Any], payload: bytes = b"") -> None:
        frames = [(self.rank, encode_frame(header, payload)) for header in headers]
        self.socket.sendall(encode_from_workers(frames))

    def greet_worker(self) -> None:
        self.send_of_worker({"op": "hello", "role": "worker", "ranks": [self.rank], "host": HOST, "log": ""})

    def read(self) -> None:
        try:
            while not self.is_closed:
                data = self.socket.recv(2**16)
                self.is_closed = not data
                self.frames += self._reader.feed(data)
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.is_closed = True

    def got(self, op: str) -> list[tuple[dict[str, Any], bytes]]:
        return [frame for frame in self.frames if frame[0]["op"] == op]


class World:
    """A server, its relay if it has one, and guardians: all in one thread."""

    def __init__(self, *, has_relay: bool):
        self.secret = new_secret()
        self.served = Server(self.secret)
        self.guardians: list[Guardian] = []
        self.address = ("127.0.0.1", self.served.listener.getsockname()[1])
        self.relay: Relay | None = None
        if has_relay:
            self.relay = Relay(
                self.address,
                host=HOST,
                run_secret=RunSecret(None, Path(), value=self.secret),
                stub=FakeStub(),  # type: ignore[arg-type]
                timeouts=LaunchTimeouts(),
            )
            self.relay.begin()
            self.until(lambda: self.relay is not None and self.relay.is_serving)

    def add_guardians(self) -> None:
        for rank in range(NUM_GUARDIANS):
            self.guardians.append(Guardian(self, rank))
            self.until(lambda rank=rank: self.served.of(rank))

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX if self.relay else socket.AF_INET)
        connection.connect(relay_address(self.secret, HOST) if self.relay else self.address)
        connection.setblocking(False)
        handshake, received = ConnectingHandshake(self.secret), bytearray()
        connection.sendall(handshake.request)

        def prove() -> bool:
            try:
                received.extend(connection.recv(handshake.num_missing - len(received)))
            except BlockingIOError:
                return False
            return len(received) == 48

        self.until(prove)
        connection.sendall(handshake.feed(bytes(received)))
        return connection

    def turn(self) -> None:
        if self.relay is not None and not self.relay.is_over:
            self.relay.turn(0.0)
        self.served.server.poll(0.001)
        for guardian in self.guardians:
            guardian.read()

    def until(self, is_done: Callable[[], object]) -> None:
        deadline = time.monotonic() + 300
        while not is_done():
            assert time.monotonic() < deadline, self.served.events
            self.turn()

    def close(self) -> None:
        if self.relay is not None:
            self.relay.close()
        for guardian in self.guardians:
            guardian.socket.close()
        self.served.server.close()


@pytest.fixture
def make():
    worlds: list[World] = []

    def make_world(*, has_relay: bool = True) -> World:
        worlds.append(World(has_relay=has_relay))
        worlds[-1].add_guardians()
        return worlds[-1]

    yield make_world
    for world in worlds:
        world.close()


def play(world: World) -> tuple[list[list[Event]], list[list[tuple[str, bytes]]]]:
    """What the server sees of each guardian, and each guardian gets, in a small run."""
    for guardian in world.guardians:
        guardian.greet_worker()
    world.until(lambda: len(world.served.server.workers) == NUM_GUARDIANS)
    for guardian in world.guardians:
        guardian.send_of_worker({"op": "set", "key": "a"}, {"op": "set", "key": "b"}, payload=b"x" * 5000)
        guardian.send({"op": "offer_worker", "slot": 0})
        guardian.send_of_worker({"op": "check", "keys": ["a"], "id": guardian.rank})
    world.until(lambda: sum(event[3].get("op") == "check" for event in world.served.events) == NUM_GUARDIANS)
    server = world.served.server
    server.send_to_guardians({"op": "monitor"})
    server.send_to_workers([0, 2], {"op": "record"}, b"y" * 100_000)
    server.broadcast({"op": "stop"})
    first = server.workers[1]
    server.send(first, {"op": "response", "id": 3})
    server.end_worker(0)
    server.broadcast({"op": "abort"})
    world.until(lambda: all(len(guardian.got("abort")) == 1 for guardian in world.guardians))
    world.until(lambda: world.guardians[2].got("to_workers")[-1][1].endswith(encode_frame({"op": "abort"})))
    world.until(lambda: world.guardians[1].got("to_workers")[-1][1].endswith(encode_frame({"op": "abort"})))
    got = [
        [(json.dumps(header), payload) for header, payload in guardian.frames if header["op"] != "ping"]
        for guardian in world.guardians
    ]
    return [world.served.of(rank) for rank in range(NUM_GUARDIANS)], got


def test_nothing_differs_from_connections_of_their_own(make):
    assert play(make()) == play(make(has_relay=False))


def test_one_connection_and_one_frame_for_all(make):
    world = make()
    (connection,) = world.served.server.connections
    assert connection.role == "relay" and len(world.served.server.guardians()) == NUM_GUARDIANS
    sent: list[int] = []
    connection.outbox.add = lambda *parts: sent.append(len(parts))  # type: ignore[method-assign]
    world.served.server.send_to_guardians({"op": "monitor"})
    assert sent == [2]


def test_workers_of_a_host_that_compare_get_one_frame(make):
    world = make()
    for guardian in world.guardians:
        guardian.greet_worker()
    server, sent = world.served.server, list[int]()
    world.until(lambda: len(server.workers) == NUM_GUARDIANS)
    (relay,) = server.connections
    relay.outbox.add = lambda *parts: sent.append(len(parts))  # type: ignore[method-assign]
    store = KeyValueStore({}, server.send_to_all)
    for worker in server.workers.values():
        store.handle(worker, {"op": "compare", "key": "groups", "size": 3, "numbers": [9], "states": [""]}, b"")
    assert sent == [2]


def test_a_guardian_is_lost_alone_after_its_last_words(make):
    world = make()
    world.guardians[1].greet_worker()
    world.guardians[1].send_of_worker({"op": "finish", "exit_code": 0, "permission": ""})
    world.guardians[1].socket.close()
    world.guardians[1].is_closed = True
    assert world.relay is not None and (server := world.relay._server) is not None
    while 1 in server.guardians:  # bounded: it is closed; both come in one turn
        server.poll(0.01)
    world.until(lambda: any(event[0] == "lost" for event in world.served.events))
    events = world.served.of(1)
    assert [event[3]["op"] for event in events[:-1]] == ["hello", "hello", "finish"] and events[-1][0] == "lost"
    assert [each.guarded_ranks for each in world.served.server.guardians()] == [(0,), (2,)]
    assert 1 not in world.served.server.workers


def test_a_lost_relay_takes_all_its_guardians_along(make):
    world = make()
    for guardian in world.guardians:
        guardian.greet_worker()
    world.until(lambda: len(world.served.server.workers) == NUM_GUARDIANS)
    assert world.relay is not None
    world.relay.close()
    world.relay = None
    world.until(lambda: sum(event[0] == "lost" for event in world.served.events) == NUM_GUARDIANS)
    assert not world.served.server.guardians() and not world.served.server.workers


def test_the_relay_says_that_the_coordinator_is_lost(make):
    world = make()
    (connection,) = world.served.server.connections
    world.served.server.close_connection(connection)
    world.until(lambda: all(guardian.got("coordinator_lost") for guardian in world.guardians))
    assert world.relay is not None and world.relay.is_over


def test_the_relay_ends_with_its_last_guardian(make):
    world = make()
    for guardian in world.guardians:
        guardian.socket.close()
        guardian.is_closed = True
    world.until(lambda: world.relay is not None and world.relay.is_over)


@pytest.mark.parametrize(
    "header",
    [
        {"op": "no such"},
        {"op": "ended", "ends": 3},
        {"op": "hello", "role": "guardian", "ranks": "all"},
        {"op": "from_workers", "ranks": [1], "sizes": [3]},
        {"op": "from_workers", "ranks": "1", "sizes": []},
    ],
    ids=str,
)
def test_a_bad_frame_costs_its_guardian_alone(make, header):
    world = make()
    world.guardians[1].send(header)
    world.until(lambda: world.guardians[1].is_closed)
    world.until(lambda: world.served.of(1)[-1][0] == "lost")
    assert [each.guarded_ranks for each in world.served.server.guardians()] == [(0,), (2,)]
    world.guardians[2].greet_worker()
    world.until(lambda: 2 in world.served.server.workers)


@pytest.mark.parametrize("frame", [b"no frame at all", b""])
def test_what_is_no_frame_of_a_worker_costs_its_guardian_alone(make, frame):
    world = make()
    world.guardians[1].socket.sendall(encode_from_workers([(1, frame)]))
    world.until(lambda: world.guardians[1].is_closed)
    assert [each.guarded_ranks for each in world.served.server.guardians()] == [(0,), (2,)]


def test_a_guardian_speaks_for_its_own_workers_alone(make):
    world = make()
    world.guardians[1].socket.sendall(encode_from_workers([(2, encode_frame({"op": "finish"}))]))
    world.until(lambda: world.guardians[1].is_closed)
    assert [each.guarded_ranks for each in world.served.server.guardians()] == [(0,), (2,)]


GUARDIAN = encode_frame({"op": "hello", "role": "guardian", "ranks": [0], "host": HOST, "address": ["x", 1]})


@pytest.mark.parametrize(
    "frame",
    [
        encode_frame({"op": "from_guardians", "guardians": [0], "ranks": [], "sizes": []}),
        encode_frame({"op": "from_guardians", "guardians": [0], "ranks": [None], "sizes": [5]}),
        encode_frame({"op": "guardian_lost", "guardian": 0}),
        encode_frame({"op": "ended", "ends": []}),
        encode_frame({"op": "hello", "role": "relay"}),
        encode_from_guardians([(1, None, GUARDIAN)]),
        encode_from_workers([(0, GUARDIAN)]),
    ],
)
def test_a_bad_frame_closes_the_relay_alone(make, frame):
    world = make(has_relay=False)
    other = open_relay(world)
    other.sendall(frame)
    world.until(lambda: len(world.served.server.connections) == NUM_GUARDIANS)
    assert len(world.served.server.guardians()) == NUM_GUARDIANS


@pytest.mark.parametrize("role", ["relay", "operator", "worker"])
def test_only_guardians_speak_through_a_relay(make, role):
    world = make(has_relay=False)
    other = open_relay(world)
    hello = {"op": "hello", "role": role, "ranks": [0], "host": HOST, "log": ""}
    before = len(world.served.events)
    other.sendall(encode_from_guardians([(0, None, encode_frame(hello)), (1, None, GUARDIAN)]))
    world.until(lambda: len(world.served.server.guardians()) == NUM_GUARDIANS + 1)
    assert [event[0] for event in world.served.events[before:]] == ["lost", "guardian"]


def open_relay(world: World) -> socket.socket:
    """A relay's connection by hand."""
    connection = socket.create_connection(world.address)
    connection.setblocking(False)
    handshake = ConnectingHandshake(world.secret)
    connection.sendall(handshake.request)
    received = bytearray()

    def prove() -> bool:
        try:
            received.extend(connection.recv(48 - len(received)))
        except BlockingIOError:
            return False
        return len(received) == 48

    world.until(prove)
    connection.sendall(handshake.feed(bytes(received)) + encode_frame({"op": "hello", "role": "relay"}))
    world.until(lambda: len(world.served.server.connections) == NUM_GUARDIANS + 1)
    return connection


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, encode_frame({"op": "hello"}), GUARDIAN])
def test_strangers_at_the_relay_change_nothing(make, words):
    world = make()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(relay_address(world.secret, HOST))
        stranger.sendall(words)
        stranger.setblocking(False)

        def is_closed() -> bool:
            try:
                return not stranger.recv(100)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True

        world.until(is_closed)
    world.guardians[0].greet_worker()
    world.until(lambda: 0 in world.served.server.workers)
    assert len(world.served.server.guardians()) == NUM_GUARDIANS


def test_the_socket_is_found_by_the_secret_alone():
    secret, other = new_secret(), new_secret()
    names = {relay_address(secret, "a"), relay_address(secret, "b"), relay_address(other, "a")}
    assert len(names) == 3 and all(name.startswith("\0") and secret.hex()[:8] not in name for name in names)
