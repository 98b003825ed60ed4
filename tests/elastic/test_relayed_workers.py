"""Workers that speak to the coordinator through their guardian's connection: batches up, one frame for all down."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from parallel3d.elastic.frames import (
    MAX_VALUE_BYTES,
    FrameReader,
    decode_from_workers,
    encode_frame,
    encode_from_workers,
)
from parallel3d.elastic.protocol.membership import StateReport
from parallel3d.elastic.protocol.record_delta import decode_record
from parallel3d.errors import ProtocolError
from parallel3d.parallel.grid import Grid
from tests.support.run_secrets import open_connection

RANKS = [0, 1]


@pytest.fixture
def elastic(elastic_settings):
    return elastic_settings(Grid.uniform(tp_size=1, pp_size=1, dp_size=2))


class Relay:
    """The guardian of both workers, which relays for them."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.connection.settimeout(10)
        self._reader = FrameReader()
        self._frames: list[tuple[dict[str, Any], bytes]] = []

    def send(self, **frames: Any) -> None:
        """Sends a frame of each rank in one batch: rank0={...}."""
        batch = [(int(name[-1]), encode_frame(frame)) for name, frame in frames.items()]
        self.connection.sendall(encode_from_workers(batch))

    def next(self, op: str) -> tuple[list[int], dict[str, Any], bytes]:
        """The next frame of a kind that is for workers: (ranks, header, payload); of others: ([], header, payload)."""
        while True:
            while not self._frames:
                data = self.connection.recv(100_000)
                assert data, f"closed before {op!r}"
                self._frames += self._reader.feed(data)
            header, payload = self._frames.pop(0)
            ranks: list[int] = []
            if header["op"] == "to_workers":
                ranks = header["ranks"]
                ((header, payload),) = FrameReader().feed(payload)
            if header["op"] == op:
                return ranks, header, payload


def hello(rank: int) -> dict[str, Any]:
    return {"op": "hello", "role": "worker", "ranks": [rank], "host": "here", "log": ""}


@pytest.fixture
def relay(world):
    _, _, guardian, _ = world
    relay = Relay(guardian)
    relay.send(rank0=hello(0), rank1=hello(1))
    return relay


def report(rank: int) -> dict[str, Any]:
    return {"op": "report", "report": StateReport(rank=rank, generation=0, host="here").to_json()}


def test_a_generation_through_the_guardian(relay):
    relay.send(rank0=report(0), rank1=report(1))
    ranks, _, payload = relay.next("record")
    assert ranks == RANKS and decode_record(payload, None).members == (0, 1)
    confirm = {"op": "confirm", "generation": 0, "digest": "", "moved_bytes": 0}
    relay.send(rank0=confirm, rank1=confirm)
    assert relay.next("commit")[0] == RANKS
    relay.send(rank1={"op": "set", "key": "a"}, rank0={"op": "get", "key": "a", "id": 7})
    ranks, header, _ = relay.next("response")
    assert ranks == [0] and header["id"] == 7


def test_a_frame_out_of_place_costs_that_worker_alone(relay):
    relay.send(rank1={"op": "entries", "generation": 0}, rank0={"op": "check", "keys": ["a"], "id": 1})
    assert relay.next("close_worker")[1]["rank"] == 1
    assert relay.next("response")[0] == [0]
    ((rank, why),) = relay.next("kill")[1]["ends"]
    assert rank == 1 and "which it was not asked for" in why
    relay.send(rank1={"op": "set", "key": "a"}, rank0={"op": "check", "keys": ["a"], "id": 2})
    assert relay.next("response")[1]["found"] is False


def test_a_frame_that_repeats_another_one_is_as_right_or_wrong(relay):
    """Equal frames are read and checked once."""
    wrong = {"op": "suspect", "generation": "0", "reason": ""}
    relay.send(rank0=wrong, rank1=wrong)
    assert [relay.next("close_worker")[1]["rank"] for _ in RANKS] == RANKS


def test_a_frame_that_repeats_another_one_comes_after_the_hello(world):
    relay = Relay(world[2])
    suspect = {"op": "suspect", "generation": 0, "reason": "slow"}
    relay.send(rank0=hello(0))
    relay.send(rank0=suspect, rank1=suspect)
    assert relay.next("close_worker")[1]["rank"] == 1
    relay.send(rank0={"op": "check", "keys": ["a"], "id": 1})
    assert relay.next("response")[0] == [0]


def test_a_guardian_speaks_for_its_own_workers_alone(world):
    address, *_ = world
    fields = {"role": "guardian", "ranks": [1], "host": "here", "address": ["127.0.0.1", 1]}
    other = open_connection(address, {"op": "hello", **fields})
    relay = Relay(other)
    relay.send(rank0=hello(0))
    with pytest.raises((AssertionError, ConnectionResetError)):
        relay.next("response")


@pytest.mark.parametrize("fields", [{"ranks": [1]}, {"role": "guardian", "address": ["x", 1]}])
def test_a_worker_speaks_for_itself_alone(world, fields):
    relay = Relay(world[2])
    relay.send(rank0={**hello(0), **fields})
    assert relay.next("close_worker")[1]["rank"] == 0


def test_the_largest_value(relay):
    value = bytes(MAX_VALUE_BYTES)
    relay.connection.sendall(encode_from_workers([(0, encode_frame({"op": "set", "key": "a"}, value))]))
    relay.send(rank1={"op": "get", "key": "a", "id": 1})
    ranks, _, payload = relay.next("response")
    assert ranks == [1] and payload == value


def test_a_value_that_is_too_large_costs_its_guardian(relay):
    """Which checks what its workers send, and would have killed this one."""
    value = bytes(MAX_VALUE_BYTES + 1)
    with pytest.raises((AssertionError, ConnectionResetError, BrokenPipeError)):
        relay.connection.sendall(encode_from_workers([(0, encode_frame({"op": "set", "key": "a"}, value))]))
        relay.next("response")


def test_a_worker_whose_exit_is_reported_gets_nothing_more(relay):
    relay.send(rank0={"op": "get", "key": "a", "id": 1}, rank1={"op": "check", "keys": [], "id": 2})
    assert relay.next("response")[0] == [1]
    end = {"rank": 0, "exit_code": -9, "by_guardian": False, "why": "", "detect_s": 0.1, "step": 1}
    relay.connection.sendall(encode_frame({"op": "ended", "ends": [{**end, "permission": ""}]}))
    relay.send(rank1={"op": "set", "key": "a"})
    relay.send(rank1={"op": "get", "key": "a", "id": 3})
    ranks, header, _ = relay.next("response")
    assert (ranks, header["id"]) == ([1], 3)


@pytest.mark.parametrize("sizes", [[1], [10**6], [3, 3]])
def test_batches_whose_sizes_are_wrong(sizes):
    with pytest.raises(ProtocolError):
        list(decode_from_workers({"ranks": [0], "sizes": sizes}, encode_frame({"op": "check"})))


def test_a_batch_that_holds_too_large_a_value():
    largest, too_large = (encode_frame({"op": "set"}, bytes(MAX_VALUE_BYTES + more)) for more in (0, 1))
    ((_, _, value),) = decode_from_workers({"ranks": [0], "sizes": [len(largest)]}, largest)
    assert len(value) == MAX_VALUE_BYTES
    with pytest.raises(ProtocolError, match=f"lengths .* {MAX_VALUE_BYTES + 1}"):
        list(decode_from_workers({"ranks": [0], "sizes": [len(too_large)]}, too_large))


@pytest.mark.parametrize("part", ["", "half", "two", "with a tail"])
def test_a_part_of_a_batch_that_is_not_one_frame(part):
    frame = encode_frame({"op": "set", "key": "a"}, b"value")
    payload = {"": b"", "half": frame[:-3], "two": frame + frame, "with a tail": frame + b"x"}[part]
    good = encode_frame({"op": "check"})
    batch = decode_from_workers({"ranks": [0, 1], "sizes": [len(good), len(payload)]}, good + payload)
    assert next(batch) == (0, {"op": "check"}, b"")
    with pytest.raises(ProtocolError, match="not one frame of rank 1"):
        next(batch)
