"""The frames, and the two ends of the channel within one process."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.comm.abort import AbortToken
from parallel3d.elastic.control import Control, FrameReader, encode_frame, open_connection
from parallel3d.elastic.coordinator import Coordinator, Limits, open_listener
from parallel3d.errors import EpochEnded, LaunchError, ProtocolError

HEADERS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=3)


@given(frames=st.lists(st.tuples(HEADERS, st.binary(max_size=40)), max_size=5), cuts=st.lists(st.integers(0, 400)))
def test_frames_survive_any_chunking(frames, cuts):
    stream = b"".join(encode_frame(header, payload) for header, payload in frames)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader, read = FrameReader(), []
    for start, end in zip(edges, edges[1:]):
        read += reader.feed(stream[start:end])
    assert read == frames


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x02\0\0\0\0[]", b"\0\0\0\x02\0\0\0\0{{", b"\0\0\0\x01\xff\0\0\0x"]
)
def test_what_is_no_frame_is_refused(data):
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(data))


@pytest.fixture
def world():
    """A coordinator of two workers and a guardian's bare connection: (connect, guardian, records)."""
    records: list[dict] = []
    listener = open_listener("127.0.0.1", 0)
    address = ("127.0.0.1", listener.getsockname()[1])
    coordinator = Coordinator(listener, world_size=2, emit=records.append, limits=Limits())
    coordinator.start()
    guardian = open_connection(address, {"op": "hello", "role": "guardian", "ranks": [0, 1]}, timeout_s=5)

    def connect(rank: int) -> Control:
        hello = {"op": "hello", "role": "worker", "ranks": [rank], "host": "here", "log": ""}
        controls.append(Control(open_connection(address, hello, timeout_s=5), rank=rank, world_size=2))
        return controls[-1]

    controls: list[Control] = []
    yield address, connect, guardian, records
    for control in controls:
        control.finish(0)
    guardian.close()
    coordinator.join(5)


def tell(guardian: socket.socket, **header) -> None:
    guardian.sendall(encode_frame(header))


def test_get_waits_for_set(world):
    _, connect, _, _ = world
    first, second = connect(0), connect(1)
    threading.Timer(0.1, first.set, ("key", b"value")).start()
    assert second.get("key", AbortToken()) == b"value"
    assert first.add("count", 2, AbortToken()) == 2 and second.add("count", 3, AbortToken()) == 5
    assert not second.check(["key", "other"], AbortToken()) and second.check(["key"], AbortToken())


def test_get_leaves_when_its_token_is_aborted(world):
    _, connect, _, _ = world
    control, token = connect(0), AbortToken()
    threading.Timer(0.1, token.abort, ("enough",)).start()
    started = time.monotonic()
    with pytest.raises(EpochEnded, match="enough"):
        control.get("never", token)
    assert time.monotonic() - started < 1


def test_everything_said_before_finish_has_arrived_after_it(world):
    _, connect, _, records = world
    control = connect(0)
    for number in range(1000):
        control.publish({"event": "count", "number": number})
    control.finish(0)
    assert [record["number"] for record in records] == list(range(1000))


def test_a_record_that_json_can_not_carry_is_refused_at_once(world):
    with pytest.raises(TypeError):
        world[1](0).publish({"event": "bad", "value": object()})


def test_a_stop_reaches_every_worker_and_is_no_abort(world):
    _, connect, guardian, records = world
    controls = [connect(0), connect(1)]
    assert not controls[0].check(["x"], AbortToken()) and not controls[1].check(["x"], AbortToken())  # both greeted
    tell(guardian, op="stop", signal=2, at_once=False)
    deadline = time.monotonic() + 5
    while not all(control.stop_requested for control in controls):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not any(control.token.aborted for control in controls)
    assert [record["text"] for record in records] == ["stopping after this step; press Ctrl-C again to stop at once"]


def test_a_lost_worker_aborts_the_other_with_the_reason(world):
    _, connect, guardian, _ = world
    control = connect(0)
    assert not control.check(["x"], AbortToken())  # it is greeted, so the news has to be pushed
    tell(guardian, op="ended", rank=1, exit_code=-9, by_guardian=False)
    with pytest.raises(EpochEnded, match="rank 1 was killed by SIGKILL"):
        control.token.sleep(5)


def test_a_lost_guardian_is_a_lost_worker(world):
    _, connect, guardian, _ = world
    control = connect(0)
    assert not control.check(["x"], AbortToken())
    guardian.close()
    with pytest.raises(EpochEnded, match="its guardian on here is gone"):
        control.token.sleep(5)


def test_strangers_do_not_disturb(world):
    address, connect, _, _ = world
    for words in (b"GET / HTTP/1.1\r\n\r\n", encode_frame({"op": "set", "key": "k"}), encode_frame({"op": "hello"})):
        with socket.create_connection(address) as stranger:
            stranger.settimeout(5)
            stranger.sendall(words)
            assert stranger.recv(1) == b""  # shown the door
    control = connect(0)
    control.set("key", b"1")
    assert control.get("key", AbortToken()) == b"1"


def test_a_broken_connection_aborts_the_worker():
    ours, theirs = socket.socketpair()
    control = Control(ours, rank=0, world_size=1)
    theirs.close()
    with pytest.raises(EpochEnded):
        control.token.sleep(5)


def test_nobody_at_the_address_is_one_message_in_time():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()
    started = time.monotonic()
    with pytest.raises(LaunchError, match=f"127.0.0.1:{address[1]} within 0.3 s"):
        open_connection(address, {}, timeout_s=0.3)
    assert time.monotonic() - started < 2
