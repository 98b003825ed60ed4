"""A guardian's end of its workers' channels, without processes: what goes up, in which order, what a worker costs."""

from __future__ import annotations

import selectors
import socket
from typing import Any

import pytest

from parallel3d.elastic.frames import FrameReader, decode_from_workers, encode_frame
from parallel3d.elastic.guardian import worker_channels
from parallel3d.elastic.guardian.worker_channels import WorkerChannels

HELLO = {"op": "hello"}


class FakeLink:
    """A connection to a coordinator that keeps what is sent."""

    def __init__(self) -> None:
        self.is_open = False
        self.num_unsent_bytes = 0
        self.batches: list[list[tuple[int, dict[str, Any]]]] = []

    def send_encoded(self, frame: bytes) -> None:
        ((header, payload),) = FrameReader().feed(frame)
        self.batches.append([(rank, inner) for rank, inner, _ in decode_from_workers(header, payload)])

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        frames = [frame for batch in self.batches for frame in batch]
        self.batches.clear()
        return frames


class World:
    """Two workers' channels; `workers` are the other ends."""

    def __init__(self) -> None:
        self.link = FakeLink()
        self.selector = selectors.DefaultSelector()
        self.located: list[Any] = []
        self.broken: dict[int, str] = {}
        pairs = [socket.socketpair() for _ in range(2)]
        self.workers = [theirs for _, theirs in pairs]
        self.readers = [FrameReader() for _ in pairs]
        self.channels = WorkerChannels(
            self.selector,
            {rank: ours for rank, (ours, _) in enumerate(pairs)},
            link=self.link,  # type: ignore[arg-type]
            on_located=lambda address, secret: self.located.append((address, secret)),
            on_broken=self.broken.__setitem__,
        )

    def say(self, rank: int, *frames: dict[str, Any]) -> None:
        for frame in frames:
            self.workers[rank].sendall(encode_frame(frame))

    def turn(self) -> list[tuple[int, dict[str, Any]]]:
        """Reads until nothing is left; returns what goes up."""
        while ready := [key for key, _ in self.selector.select(0)]:
            for key in ready:
                key.data()
        self.channels.turn()
        return self.link.take()

    def welcome(self) -> None:
        self.link.is_open = True
        self.channels.on_welcome(b"secret")

    def lose(self) -> None:
        self.link.is_open = False
        self.channels.lose_coordinator("gone", is_final=False)

    def heard(self, rank: int) -> list[str]:
        """The frames that a worker has got, without pings."""
        self.workers[rank].setblocking(False)
        try:
            frames = list(self.readers[rank].feed(self.workers[rank].recv(2**20)))
        except BlockingIOError:
            return []
        return [header["op"] for header, _ in frames if header["op"] != "ping"]


@pytest.fixture
def world():
    world = World()
    yield world
    world.channels.close_all()
    for worker in world.workers:
        worker.close()
    world.selector.close()


def numbered(rank: int, *numbers: int) -> list[dict[str, Any]]:
    return [{"op": "publish", "record": {"rank": rank, "number": number}} for number in numbers]


def test_what_is_said_before_there_is_a_coordinator_waits_for_it(world):
    world.say(0, HELLO, *numbered(0, 1, 2))
    world.say(1, {"op": "located", "address": ["x", 1], "secret": "0a"})
    assert world.turn() == [] and world.located == [(("x", 1), b"\n")]
    world.welcome()
    assert world.turn() == [(0, HELLO), *((0, frame) for frame in numbered(0, 1, 2))]
    assert world.heard(0) == ["connected"] == world.heard(1)
    world.say(1, HELLO)
    assert world.turn() == [(1, HELLO)]


def test_a_turn_is_one_batch_in_each_workers_order(world):
    world.welcome()
    for rank in (0, 1):
        world.say(rank, HELLO, *numbered(rank, *range(5)))
    for key, _ in world.selector.select(0):
        key.data()
    world.channels.turn()
    assert len(world.link.batches) == 1
    frames = world.link.take()
    for rank in (0, 1):
        assert [frame for number, frame in frames if number == rank] == [HELLO, *numbered(rank, *range(5))]


def test_batches_are_bounded_but_one_large_frame_is_not_cut(world, monkeypatch):
    monkeypatch.setattr(worker_channels, "MAX_BATCH_BYTES", 500)
    world.welcome()
    large = {"op": "publish", "record": {"text": "x" * 1000}}
    world.say(0, HELLO, *numbered(0, *range(20)), large, *numbered(0, 20))
    for key, _ in world.selector.select(0):
        key.data()
    world.channels.turn()
    sizes = [sum(len(encode_frame(frame)) for _, frame in batch) for batch in world.link.batches]
    assert len(sizes) > 3 and sum(size > 500 for size in sizes) == 1
    assert world.link.take() == [(0, frame) for frame in (HELLO, *numbered(0, *range(20)), large, *numbered(0, 20))]


def test_a_successor_gets_the_hello_first_and_nothing_that_was_meant_for_the_lost_one(world):
    world.welcome()
    world.say(0, HELLO)
    world.turn()
    world.lose()
    stale = [{"op": "entries", "generation": 3}, {"op": "report", "report": {}}, {"op": "confirm", "generation": 3}]
    error = {"op": "error", "error": {}}
    again = {**HELLO, "membership_state": {}}
    world.say(0, *stale, error, again, *numbered(0, 7))
    assert world.turn() == []
    world.welcome()
    assert world.turn() == [(0, again), (0, error), *((0, frame) for frame in numbered(0, 7))]
    assert world.heard(0) == ["connected", "coordinator_lost"]


def test_a_step_that_is_said_before_the_hello_comes_in_its_turn(world):
    """The worker says it again among the older ones, which the successor would take for written if it came first."""
    steps = [{"op": "publish", "record": {"kind": "step", "step": number}} for number in (1, 2, 3)]
    notice = {"op": "publish", "record": {"kind": "notice", "text": "x"}}
    world.welcome()
    world.say(0, HELLO, *steps[:2])
    world.turn()
    world.lose()
    again = {**HELLO, "membership_state": {}}
    world.say(0, notice, steps[2], again, *steps)
    world.welcome()
    assert world.turn() == [(0, frame) for frame in (again, notice, *steps)]


def test_a_hello_that_a_second_loss_has_overtaken_is_not_passed_on(world):
    world.welcome()
    world.say(0, HELLO)
    world.turn()
    first, second = ({**HELLO, "membership_state": {"number": number}} for number in (1, 2))
    world.lose()
    world.welcome()
    world.lose()
    world.say(0, first)
    world.welcome()
    assert world.turn() == []
    world.say(0, {"op": "confirm", "generation": 3}, second)
    assert world.turn() == [(0, second)]


def test_a_worker_that_does_not_read_costs_itself_alone(world, monkeypatch):
    monkeypatch.setattr(worker_channels, "MAX_UNREAD_BYTES", 2**20)
    frame = encode_frame({"op": "response"}, bytes(2**20))
    world.channels.send([0, 1], frame)
    while 0 not in world.broken:
        world.channels.send([0], frame)
    assert world.broken == {0: "it does not read what the coordinator sends"}
    world.workers[1].settimeout(10)
    num_bytes = 0
    while num_bytes < len(frame):
        num_bytes += len(world.workers[1].recv(2**20))
        for key, _ in world.selector.select(0):
            key.data()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a control frame"),
        (b"\0\0\0\x02\x7f\0\0\0{}", "not a control frame"),
        (b"\0\0\0\x02\0\0\0\0[]", "not a control frame"),
        (encode_frame(HELLO), "a hello that was not asked for"),
        (encode_frame({"op": "located", "address": ["x"], "secret": ""}), "without address"),
        (encode_frame({"op": "located", "address": ["x", 1], "secret": "x"}), "without address"),
    ],
)
def test_a_malformed_frame_costs_its_worker_alone(world, data, why):
    world.welcome()
    world.say(0, HELLO)
    world.turn()
    world.workers[0].sendall(data)
    world.say(1, HELLO, {"op": ["of another", "form"]})
    assert world.turn() == [(1, HELLO), (1, {"op": ["of another", "form"]})]  # the coordinator judges that one
    assert list(world.broken) == [0] and why in world.broken[0]


def test_a_worker_that_never_says_hello_is_not_held_for_ever(world, monkeypatch):
    monkeypatch.setattr(worker_channels, "MAX_UNSENT_BYTES", 1000)
    world.say(0, *numbered(0, *range(100)))
    world.turn()
    assert "without a hello" in world.broken[0]


def test_last_words_come_before_the_end_of_the_channel(world):
    world.welcome()
    finish = {"op": "finish", "exit_code": 0, "permission": "drained"}
    world.say(0, HELLO, *numbered(0, *range(100)), finish)
    world.workers[0].close()
    assert world.channels.drain(0) == "drained"
    assert [frame for _, frame in world.link.take()] == [HELLO, *numbered(0, *range(100)), finish]
    world.turn()
    assert not world.broken


def test_a_worker_without_its_channel_is_lost_unless_it_has_finished(world, monkeypatch):
    monkeypatch.setattr(worker_channels, "BROKEN_CHANNEL_S", 0.0)
    world.say(0, HELLO, {"op": "finish", "exit_code": 0, "permission": "drained"})
    world.say(1, HELLO)
    for worker in world.workers:
        worker.close()
    world.turn()
    assert world.broken == {1: "its connection to the coordinator broke"}


def test_workers_are_not_read_while_the_coordinator_does_not_read(world):
    world.welcome()
    world.say(0, HELLO)
    world.turn()
    world.link.num_unsent_bytes = worker_channels.MAX_UNSENT_BYTES + 1
    world.turn()
    world.say(0, *numbered(0, 1))
    assert world.turn() == []
    world.link.num_unsent_bytes = 0
    world.turn()
    assert [frame for _, frame in world.turn()] == numbered(0, 1)


def test_a_closed_channel_ends_its_worker_alone(world):
    world.channels.close(0)
    assert world.workers[0].recv(10) == b""
    world.channels.send([0, 1], encode_frame({"op": "stop"}))
    assert world.heard(1) == ["stop"]
