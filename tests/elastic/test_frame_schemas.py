"""A frame that a known peer may not send costs that peer its connection, and nothing else."""

from __future__ import annotations

import copy
import json
import random
import socket
import struct
import time
from typing import Any

import pytest

from parallel3d.elastic.coordinator.run_status import describe_error
from parallel3d.elastic.frame_schemas import FRAMES, HELLO, check_frame, parse
from parallel3d.elastic.frames import FrameReader, encode_frame, encode_from_workers
from parallel3d.elastic.protocol.membership import StateReport
from parallel3d.errors import OutOfPlaceError, ProtocolError
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from tests.support.frame_examples import END, GOOD, HELLOS
from tests.support.run_secrets import open_connection

WRONG: tuple[object, ...] = (None, True, -(2**70), 2**70, "x" * (2**20 + 1), [[]], {"a": 1}, [None])


def good_frames() -> list[tuple[str, dict[str, Any]]]:
    frames = [(role, {"op": op, **fields}) for role, ops in GOOD.items() for op, fields in ops.items()]
    return frames + [("", {"op": "hello", "role": role, **fields}) for role, fields in HELLOS.items()]


def bad_frames() -> list[tuple[str, dict[str, Any]]]:
    """Good ones without one of their fields, or with one of another type."""
    found = []
    for role, frame in good_frames():
        for name in frame:
            found.append((role, {key: value for key, value in frame.items() if key != name}))
            found += [(role, {**frame, name: wrong}) for wrong in WRONG if type(wrong) is not type(frame[name])]
    return found


def test_every_frame_has_an_example():
    assert {role: set(ops) for role, ops in FRAMES.items()} == {role: set(ops) for role, ops in GOOD.items()}
    assert HELLO.keys() == HELLOS.keys()


@pytest.mark.parametrize("role, frame", good_frames(), ids=lambda value: str(value)[:40])
def test_frames_as_they_are_sent(role, frame):
    check_frame(role, json.loads(json.dumps(frame)), b"1" if frame["op"] == "set" else b"")


def test_frames_with_a_wrong_field():
    frames = bad_frames()
    assert len(frames) > 200
    for role, frame in frames:
        with pytest.raises(ProtocolError):
            check_frame(role, frame, b"")


@pytest.mark.parametrize(
    "role, frame, payload",
    [
        ("", {"op": "stop", "signal": 15, "at_once": True}, b""),
        ("", {"op": "hello", "role": "coordinator", "ranks": [0]}, b""),
        ("", {"op": "hello", "role": ["worker"]}, b""),
        ("worker", {"op": "hello", "role": "worker", **HELLOS["worker"]}, b""),
        ("worker", {"op": "ended", "ends": []}, b""),
        ("worker", {"op": "record"}, b""),
        ("guardian", {"op": "report", "report": {}}, b""),
        ("guardian", {"op": "ping"}, b"payload"),
        ("worker", {"op": 3}, b""),
        ("worker", {**GOOD["worker"]["compare"], "op": "compare", "numbers": [2**40]}, b""),  # a bit of the answer
        ("worker", {"op": "publish", "record": {"kind": "step", "step": "three"}}, b""),
        ("worker", {"op": "publish", "record": {"kind": "step", "step": 3, "loss": 1, "step_s": []}}, b""),
    ],
)
def test_frames_out_of_place(role, frame, payload):
    with pytest.raises(ProtocolError):
        check_frame(role, frame, payload)


def test_any_damage_to_a_report_is_the_senders():
    """Replaces each value of a report by others; reading it either works or raises the one error."""
    report = StateReport(rank=1, generation=0).to_json()
    for name in report:
        for wrong in (*WRONG, 3, "", [], {}):
            damaged = {**copy.deepcopy(report), name: wrong}
            try:
                parse(StateReport.from_json, damaged)
            except OutOfPlaceError:
                continue
    with pytest.raises(OutOfPlaceError, match="malformed: KeyError"):
        parse(StateReport.from_json, {})


@pytest.fixture
def elastic(elastic_settings):
    return elastic_settings(Grid.uniform(tp_size=1, pp_size=1, dp_size=2))


def hello_of(role: str) -> dict[str, Any]:
    return {"op": "hello", "role": role, **HELLOS[role]}


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(10)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return True
    return True


def next_frame(connection: socket.socket, op: str) -> dict[str, Any]:
    reader = FrameReader()
    connection.settimeout(10)
    while True:
        data = connection.recv(4096)
        assert data, f"closed before {op!r}"
        for header, _ in reader.feed(data):
            if header["op"] == op:
                return header


ILL = [
    {"op": "entries", "generation": 0},
    {"op": "confirm", "generation": 7, "digest": "", "moved_bytes": 0},
    {"op": "finish_generation", "generation": 0},
    {"op": "report", "report": {"generation": []}},
    {"op": "report", "report": StateReport(rank=0, generation=0).to_json()},
    {"op": "publish", "record": {"kind": "step", "step": None}},
    {"op": "over", "exit_code": 0},
]


@pytest.mark.parametrize("frame", ILL, ids=lambda frame: str(frame)[:60])
def test_a_worker_that_sends_it_is_killed_by_its_guardian(world, frame):
    address, connect, guardian, _ = world
    first = connect(0)
    bad = open_connection(address, hello_of("worker"))
    bad.sendall(encode_frame(frame))
    assert is_closed(bad)
    ((rank, why),) = next_frame(guardian, "kill")["ends"]
    assert rank == 1 and why.startswith("its connection to the coordinator broke (")
    first.set("key", b"1")
    assert first.get("key", AbortToken()) == b"1" and not first.token.aborted


@pytest.mark.parametrize("ranks", [[0], [0, 1], [], [7]])
def test_a_hello_that_can_not_be_is_refused(world, ranks):
    """One rank of a worker that is connected, several, none, an unknown one: the worker itself goes on."""
    address, connect, _, _ = world
    first = connect(0)
    other = open_connection(address, {**hello_of("worker"), "ranks": ranks})
    assert is_closed(other)
    first.set("key", b"1")
    assert first.get("key", AbortToken()) == b"1" and not first.token.aborted


def test_noise_of_a_known_peer_changes_nothing(world):
    address, connect, _, _ = world
    first = connect(0)
    draw = random.Random(1)
    for number in range(20):
        bad = open_connection(address, hello_of("worker"))
        noise = draw.randbytes(200)
        bad.sendall(noise if number % 2 else struct.pack(">II", len(noise), 0) + noise)
        bad.shutdown(socket.SHUT_WR)
        assert is_closed(bad)
    first.set("key", b"1")
    assert first.get("key", AbortToken()) == b"1" and not first.token.aborted


def test_a_guardian_may_report_its_own_workers_alone(world):
    address, connect, _, _ = world
    first = connect(0)
    hello = {**hello_of("guardian"), "ranks": [1]}
    other = open_connection(address, hello)
    other.sendall(encode_frame({"op": "ended", "ends": [{**END, "rank": 0}]}))
    assert is_closed(other)
    first.set("key", b"1")
    assert first.get("key", AbortToken()) == b"1" and not first.token.aborted


CHECK = encode_frame({"op": "check", "keys": ["x"], "id": 0})
RELAYED = {
    "half a frame": ([1], [9], CHECK[:9]),
    "two frames": ([1], [2 * len(CHECK)], CHECK + CHECK),
    "nothing": ([1], [0], b""),
    "sizes": ([1], [5, 6], CHECK),
    "more than there is": ([1], [999], CHECK),
    "another guardian's worker": ([0], [len(CHECK)], CHECK),
    "noise": ([1], [40], bytes(range(40))),
}


@pytest.mark.parametrize("case", RELAYED)
def test_a_guardian_that_relays_what_it_may_not_is_lost(world, case):
    address, connect, _, _ = world
    first = connect(0)
    ranks, sizes, payload = RELAYED[case]
    other = open_connection(address, {**hello_of("guardian"), "ranks": [1]})
    other.sendall(encode_frame({"op": "from_workers", "ranks": ranks, "sizes": sizes}, payload))
    assert is_closed(other)
    first.set("key", b"1")
    assert first.get("key", AbortToken()) == b"1" and not first.token.aborted


def test_a_relayed_frame_that_its_worker_may_not_send_costs_that_worker_alone(world):
    address, connect, _, _ = world
    first = connect(0)
    guardian = open_connection(address, {**hello_of("guardian"), "ranks": [1]})
    frames = [encode_frame(hello_of("worker")), encode_frame({"op": "ended", "ends": []})]
    guardian.sendall(encode_from_workers([(1, frame) for frame in frames]))
    ((rank, why),) = next_frame(guardian, "kill")["ends"]
    assert rank == 1 and "'ended' from a worker" in why
    first.set("key", b"1")
    assert first.get("key", AbortToken()) == b"1" and not first.token.aborted


def test_an_evicted_worker_neither_fails_nor_changes_the_run(world):
    """Its guardian is gone, and it ends with an error of its own."""
    address, connect, guardian, records = world
    first, second = connect(0), connect(1)
    hello = {**hello_of("guardian"), "ranks": [1]}
    open_connection(address, hello).close()
    deadline = time.monotonic() + 300
    while not first.membership.membership_state()["newest_generation"]:  # the change that evicts it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second.report_error(describe_error(RuntimeError("it has no guardian")))
    second.set("key", b"2")
    second.publish({"kind": "notice", "text": "still here"})
    second.finish(1)
    assert not first.check(["key"], AbortToken()) and not first.token.aborted
    assert not [record for record in records if record.get("event") == "failure" or record.get("text") == "still here"]
