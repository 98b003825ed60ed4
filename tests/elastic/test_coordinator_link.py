"""A guardian's connection to the coordinator, in one thread: it never waits, and finds what there is to be found."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel3d.elastic.coordinator.connection import Connection
from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.listener import open_listener
from parallel3d.elastic.guardian import coordinator_link, name_lookup
from parallel3d.elastic.guardian.coordinator_link import CoordinatorLink
from parallel3d.elastic.guardian.link_events import LinkEvents
from parallel3d.elastic.guardian.run_secret import RunSecret
from parallel3d.elastic.protocol.failover import FailoverPlan, GuardianInfo
from parallel3d.elastic.settings import LaunchTimeouts
from tests.support.run_secrets import SECRET

HELLO: dict[str, Any] = {"op": "hello", "role": "guardian", "ranks": [0], "host": "b", "address": ["127.0.0.1", 1]}
OWN = GuardianInfo(ranks=(0,), host="b", address=("127.0.0.1", 1))


class Served:
    """A coordinator's connections: it welcomes, and keeps what it gets."""

    def __init__(self, port: int = 0) -> None:
        listener = open_listener("127.0.0.1", port)
        self.address = ("127.0.0.1", listener.getsockname()[1])
        self.got: list[dict[str, Any]] = []
        self.lost: list[Connection] = []
        self.server = ConnectionServer(
            listener, secret=SECRET, control_s=30.0, on_message=self._on_message, on_lost=self.lost.append
        )

    def _on_message(self, connection: Connection, header: dict[str, Any], payload: bytes) -> None:
        self.got.append(header)
        if header["op"] == "hello":
            connection.hello, connection.guarded_ranks = header, tuple(header["ranks"])
            self.server.send(connection, {"op": "welcome"})


class FakeStub:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def send(self, header: dict[str, Any]) -> None:
        self.messages.append(header)


class World:
    """A link, and the coordinators that `until` serves."""

    def __init__(self, *, secret: bytes = SECRET, **timeouts: float):
        self.selector = selectors.DefaultSelector()
        self.stub = FakeStub()
        self.servers: list[Served] = []
        self.frames: list[tuple[dict[str, Any], bytes]] = []
        self.events: list[Any] = []
        self.link = CoordinatorLink(
            self.selector,
            own_info=OWN,
            run_secret=RunSecret(None, Path(), value=secret),
            stub=self.stub,  # type: ignore[arg-type]
            timeouts=LaunchTimeouts(**timeouts),
            events=LinkEvents(
                greet=lambda: HELLO,
                on_welcome=lambda: self.events.append("welcome"),
                on_frame=lambda header, payload: self.frames.append((header, payload)),
                on_lost=lambda: self.events.append("lost"),
                on_relay_lost=lambda: self.events.append("relay lost"),
                on_end=lambda why, speaks: self.events.append((why, speaks)),
            ),
        )

    def serve(self) -> Served:
        self.servers.append(Served())
        return self.servers[-1]

    def until(self, is_done: Callable[[], object]) -> None:
        deadline = time.monotonic() + 300
        while not is_done():
            assert time.monotonic() < deadline, (self.events, self.frames)
            for key, _ in self.selector.select(0.01):
                key.data()
            self.link.turn()
            for served in self.servers:
                served.server.poll(0.0)

    def plan(self, *candidates: GuardianInfo) -> FailoverPlan:
        return FailoverPlan(coordinator=candidates[0], guardians=(*candidates, OWN), hosts=("a", "b", "c"))


def guardian(served: Served, rank: int, host: str) -> GuardianInfo:
    return GuardianInfo(ranks=(rank,), host=host, address=served.address)


@pytest.fixture
def make():
    worlds: list[World] = []

    def make_world(**settings: Any) -> World:
        worlds.append(World(**settings))
        return worlds[-1]

    yield make_world
    for world in worlds:
        world.link.close()
        world.selector.close()
        for served in world.servers:
            served.server.close()


def test_it_greets_and_is_welcomed(make):
    world = make()
    served = world.serve()
    world.link.find(served.address)
    assert not world.link.is_open and world.link.is_searching
    world.until(lambda: world.link.is_open)
    assert world.events == ["welcome"] and served.got == [HELLO]
    assert world.stub.messages == [{"op": "located", "address": list(served.address), "secret": SECRET.hex()}]


def test_a_host_may_have_a_name(make):
    world = make()
    served = world.serve()
    world.link.find(("localhost", served.address[1]))
    world.until(lambda: world.link.is_open)
    assert world.events == ["welcome"]


def test_a_look_up_holds_nothing_up(make, monkeypatch):
    def getaddrinfo(*arguments: Any, flags: int = 0) -> Any:
        if not flags:  # in the child
            time.sleep(600)
        raise socket.gaierror

    monkeypatch.setattr(name_lookup.socket, "getaddrinfo", getaddrinfo)
    world = make(connect_s=0.5)
    world.link.find(("node7", 29500))
    world.until(lambda: world.events)
    why = "could not reach the run's coordinator at node7:29500 within 0.5 s (no answer to the look-up of node7)"
    assert world.events == [(why, True)] and world.link._lookup is None


def test_a_name_that_is_not_known_yet_is_looked_up_again(make, monkeypatch, tmp_path):
    def getaddrinfo(*arguments: Any, flags: int = 0) -> Any:
        if not flags:  # in the child
            if (tmp_path / "known").exists():
                return [(None, None, None, None, ("127.0.0.1", 0))]
            (tmp_path / "asked").touch()
        raise socket.gaierror

    monkeypatch.setattr(name_lookup.socket, "getaddrinfo", getaddrinfo)
    world = make()
    served = world.serve()
    world.link.find(("node7", served.address[1]))
    world.until(lambda: (tmp_path / "asked").exists())
    (tmp_path / "known").touch()
    world.until(lambda: world.link.is_open)
    assert world.events == ["welcome"]


def test_a_coordinator_that_begins_late_is_found(make):
    world = make()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()
    world.link.find(address)
    late = time.monotonic() + 0.3
    world.until(lambda: time.monotonic() > late)
    world.servers.append(Served(address[1]))
    world.until(lambda: world.link.is_open)


def test_a_listener_that_does_not_answer_is_not_waited_for(make):
    world = make(connect_s=0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        world.link.find(silent.getsockname())
        world.link.turn()
        assert world.link.is_searching and not world.events
        world.until(lambda: world.events)
    ((why, speaks),) = world.events
    assert speaks and why.startswith("could not reach the run's coordinator at 127.0.0.1:") and "within 0.5 s" in why


def test_another_runs_coordinator_is_named(make):
    world = make(secret=b"another secret", connect_s=0.5)
    world.link.find(world.serve().address)
    world.until(lambda: world.events)
    assert "does not know this run's secret" in world.events[0][0]


def test_frames_larger_than_the_sockets_buffers_in_both_directions(make):
    world = make()
    served = world.serve()
    world.link.find(served.address)
    world.until(lambda: world.link.is_open)
    big = "x" * 8_000_000
    world.link.send({"op": "ended", "ends": [], "text": big})
    assert world.link.num_unsent_bytes > 0
    (connection,) = served.server.connections
    served.server.send(connection, {"op": "to_workers", "ranks": [0]}, big.encode())
    world.until(lambda: world.frames and served.got[-1].get("text") == big)
    assert world.frames[0][1] == big.encode() and world.link.num_unsent_bytes == 0


def lose_first(world: World, *others: tuple[str, bool]) -> list[Served]:
    """A link whose coordinator on host a is lost; `others`: the candidates' hosts, and whether somebody listens."""
    first, candidates = world.serve(), [world.serve() for _ in others]
    infos = [guardian(served, rank, host) for rank, (served, (host, _)) in enumerate(zip(candidates, others), 10)]
    plan = world.plan(guardian(first, 9, "a"), *infos)
    world.link.find(first.address)
    world.until(lambda: world.link.is_open)
    (connection,) = first.server.connections
    first.server.send(connection, {"op": "failover_plan", "failover_plan": plan.to_json()})
    first.server.send(connection, {"op": "abort"})
    world.until(lambda: world.frames)
    for served in (first, *(served for served, (_, is_there) in zip(candidates, others) if not is_there)):
        world.servers.remove(served)
        served.server.close()
    return candidates


def test_the_next_candidate_is_tried_at_once_where_nobody_listens(make):
    world = make(failover_s=60.0)
    candidates = lose_first(world, ("b", False), ("c", True))
    world.until(lambda: world.events[-1] == "welcome" and "lost" in world.events)
    assert world.events == ["welcome", "lost", "welcome"] and candidates[1].got[0] == HELLO
    assert world.stub.messages[-1]["address"] == list(candidates[1].address)


def test_a_coordinator_that_moves_is_left_while_it_still_serves(make):
    world = make()
    first, second = world.serve(), world.serve()
    world.link.find(first.address)
    world.until(lambda: world.link.is_open)
    plan = replace(world.plan(guardian(second, 9, "b"), guardian(first, 8, "a")), is_move=True)
    (connection,) = first.server.connections
    first.server.send(connection, {"op": "failover_plan", "failover_plan": plan.to_json()})
    world.until(lambda: world.events[-1] == "welcome" and "lost" in world.events)
    assert world.events == ["welcome", "lost", "welcome"] and second.got[0] == HELLO
    assert not first.server.connections


def test_without_any_candidate_the_run_ends_here(make):
    world = make()
    lose_first(world, ("c", False))
    world.until(lambda: isinstance(world.events[-1], tuple))
    assert world.events[1:] == [
        "lost",
        ("the run's coordinator is gone, and no other host can take over", True),
    ]


def test_a_guardian_in_a_lost_ones_place_reaches_the_coordinator(make):
    world = make()
    lose_first(world, ("b", True))
    plan = next(message for message in world.stub.messages if message["op"] == "failover_plan")["failover_plan"]
    later = make()
    served = later.serve()
    later.link.find(("127.0.0.1", 1), later.plan(guardian(served, 9, "a")))
    later.until(lambda: later.events == ["welcome"])
    assert served.got == [HELLO] and later.link.was_found
    assert FailoverPlan.from_json(plan).coordinator.host == "a"


def test_a_guardian_in_a_lost_ones_place_asks_for_a_successor(make):
    """The coordinator went before it was reached: nobody else could ask the stub, which holds its listener."""
    world = make()
    served = world.serve()
    own = GuardianInfo(ranks=OWN.ranks, host=OWN.host, address=served.address)
    world.link.find(served.address, FailoverPlan(coordinator=own, guardians=(own,), hosts=("b",)))
    world.link.turn()
    assert world.stub.messages[0]["op"] == "take_over"
    world.until(lambda: world.events == ["welcome"])


def test_after_the_end_of_the_run_nobody_is_searched_for(make):
    world = make()
    served = world.serve()
    world.link.find(served.address)
    world.until(lambda: world.link.is_open)
    world.link.end()
    world.servers.clear()
    served.server.close()
    world.until(lambda: "lost" in world.events)
    assert world.events == ["welcome", "lost"] and not world.link.is_searching


def test_last_words_are_sent_before_the_end(make, monkeypatch):
    """More of them than fit into the socket's buffers."""
    monkeypatch.setattr(coordinator_link, "LAST_WORDS_S", 300.0)
    world = make()
    served = world.serve()
    world.link.find(served.address)
    world.until(lambda: world.link.is_open)
    world.link.send({"op": "ended", "ends": [], "text": "x" * 12_000_000})
    world.link.send({"op": "stop", "signal": 2, "at_once": False})
    assert world.link.num_unsent_bytes > 0

    def serve() -> None:
        deadline = time.monotonic() + 300
        while not served.lost and time.monotonic() < deadline:
            served.server.poll(0.01)

    serving = threading.Thread(target=serve)
    serving.start()
    world.link.close()
    serving.join(300)
    assert served.got[-1]["op"] == "stop"
