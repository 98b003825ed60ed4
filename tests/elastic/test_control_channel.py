"""The frames, and the two ends of the channel within one process."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.elastic.frames import FrameReader, encode_frame
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.elastic.protocol.record_delta import record_frame
from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.errors import GenerationEnded, ProtocolError
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from tests.support.run_secrets import SECRET

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


def send(guardian: socket.socket, **header) -> None:
    guardian.sendall(encode_frame(header))


def test_get_waits_for_set(world):
    _, connect, _, _ = world
    first, second = connect(0), connect(1)
    threading.Timer(0.1, first.set, ("key", b"value")).start()
    assert second.get("key", AbortToken()) == b"value"
    assert first.add("count", 2, AbortToken()) == 2 and second.add("count", 3, AbortToken()) == 5
    assert not second.check(["key", "other"], AbortToken()) and second.check(["key"], AbortToken())


def test_ranks_gather_what_all_have_set(world):
    controls = [world[1](rank) for rank in (0, 1)]
    got = {}

    def meet(rank):
        controls[rank].set(f"base/{rank}", bytes([rank]) * 30)
        got[rank] = controls[rank].gather("base", 2, AbortToken())

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert got == {rank: [bytes(30), bytes([1]) * 30] for rank in (0, 1)}


def test_workers_compare_and_one_that_never_comes_is_waited_for_as_long_as_the_token_lasts(world):
    controls, token = [world[1](rank) for rank in (0, 1)], AbortToken()
    with ThreadPoolExecutor(2) as pool:
        states = {0: {3: "same", 70: "mine"}, 1: {3: "same", 70: "other", 4: ""}}
        waiting = [pool.submit(controls[rank].compare, "g", 2, states[rank], token) for rank in (0, 1)]
        assert [each.result(10) for each in waiting] == [1 << 70, 1 << 70]
        alone = pool.submit(controls[0].compare, "h", 2, {0: "a"}, token)
        assert not controls[1].check(["x"], token) and not alone.done()
        token.abort("the generation is over")
        with pytest.raises(GenerationEnded, match="the generation is over"):
            alone.result(10)
    assert not controls[0].check(["x"], AbortToken())  # it lives on


def test_get_leaves_when_its_token_is_aborted(world):
    _, connect, _, _ = world
    control, token = connect(0), AbortToken()
    threading.Timer(0.1, token.abort, ("enough",)).start()
    started = time.monotonic()
    with pytest.raises(GenerationEnded, match="enough"):
        control.get("never", token)
    assert time.monotonic() - started < 30


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
    send(guardian, op="stop", signal=2, at_once=False)
    deadline = time.monotonic() + 300
    while not all(control.stop_requested for control in controls):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not any(control.token.aborted for control in controls)
    assert [record["text"] for record in records] == ["stopping after this step; press Ctrl-C again to stop at once"]


def test_a_lost_worker_aborts_the_other_with_the_reason(world):
    _, connect, guardian, _ = world
    control = connect(0)
    assert not control.check(["x"], AbortToken())  # it is greeted, so the news has to be pushed
    end = {"rank": 1, "exit_code": -9, "by_guardian": False, "why": "", "detect_s": 0.01, "step": 6, "permission": ""}
    send(guardian, op="ended", ends=[end])
    with pytest.raises(GenerationEnded, match="rank 1 was killed by SIGKILL"):
        control.token.sleep(5)


def test_a_lost_guardian_is_a_lost_worker(world):
    _, connect, guardian, _ = world
    control = connect(0)
    assert not control.check(["x"], AbortToken())
    guardian.close()
    with pytest.raises(GenerationEnded, match="its guardian on here is gone"):
        control.token.sleep(5)


def test_a_broken_connection_aborts_the_worker():
    ours, theirs = socket.socketpair()
    control = ControlChannel(ours, rank=0, world_size=1)
    theirs.close()
    with pytest.raises(GenerationEnded):
        control.token.sleep(5)


class FakeGuardian:
    """The other end of a worker's channel."""

    def __init__(self, **settings):
        ours, self.connection = socket.socketpair()
        self.connection.settimeout(5)
        self.control = ControlChannel(ours, rank=0, world_size=1, hello={"op": "hello"}, **settings)
        self._reader = FrameReader()
        self._heard: list[dict] = []

    def send(self, header: dict, payload: bytes = b"") -> None:
        self.connection.sendall(encode_frame(header, payload))

    def lose_coordinator(self, *, is_final: bool = False) -> None:
        self.send({"op": "coordinator_lost", "reason": "it is gone", "is_final": is_final})

    def next(self) -> dict:
        while not self._heard:
            self._heard += [header for header, _ in self._reader.feed(self.connection.recv(10_000))]
        return self._heard.pop(0)


def commit(guardian: FakeGuardian, generation: int) -> None:
    record = GenerationRecord(
        generation=generation, grid=Grid.uniform(tp_size=1, pp_size=1, dp_size=1), previous=None, members=(0,)
    )
    guardian.send(*record_frame(record, None))
    guardian.send({"op": "commit", "generation": generation})


def test_a_worker_says_hello_and_learns_the_secret():
    guardian = FakeGuardian()
    guardian.send({"op": "connected", "secret": SECRET.hex()})
    assert guardian.control.connect((("10.0.0.1", 4), SECRET)) == SECRET
    location = {"op": "located", "address": ["10.0.0.1", 4], "secret": SECRET.hex()}
    assert [guardian.next(), guardian.next()] == [{"op": "hello"}, location]


def test_a_worker_whose_guardian_finds_no_coordinator_gives_up():
    guardian = FakeGuardian()
    guardian.lose_coordinator(is_final=True)
    with pytest.raises(GenerationEnded, match="it is gone"):
        guardian.control.connect()


def test_what_a_worker_asks_a_lost_coordinator_it_asks_the_next_one():
    guardian, values = FakeGuardian(), []
    thread = threading.Thread(target=lambda: values.append(guardian.control.get("key", AbortToken())))
    thread.start()
    request = guardian.next()
    guardian.lose_coordinator()
    assert [guardian.next()["op"], guardian.next()] == ["hello", request]
    guardian.send({"op": "response", "id": request["id"]}, b"value")
    thread.join(5)
    assert values == [b"value"]


def test_what_a_worker_has_said_in_a_comparison_it_says_to_the_next_coordinator():
    guardian, differing = FakeGuardian(), []
    thread = threading.Thread(
        target=lambda: differing.append(guardian.control.compare("key", 2, {7: "a"}, AbortToken()))
    )
    thread.start()
    request = guardian.next()
    assert request == {"op": "compare", "key": "key", "size": 2, "numbers": [7], "states": ["a"]}
    guardian.lose_coordinator()
    assert [guardian.next()["op"], guardian.next()] == ["hello", request]
    guardian.send({"op": "response", "id": "key"}, bytes([128]))
    thread.join(5)
    assert differing == [1 << 7]


def test_the_first_hello_of_a_worker_that_was_asked_for_a_part_names_it():
    guardian = FakeGuardian(joins=True, part=(1, 0))
    guardian.send({"op": "connected", "secret": "00"})
    guardian.control.connect()
    state = {"newest_generation": -1, "committed_generation": -1, "part": [1, 0], "is_ready": False}
    assert guardian.next() == {"op": "hello", "membership_state": state}


def test_a_worker_goes_on_with_the_coordinators_successor():
    guardian = FakeGuardian()
    control = guardian.control
    step = {"kind": "step", "step": 7}
    control.publish(step)
    commit(guardian, 3)
    guardian.lose_coordinator()
    assert guardian.next()["record"] == step
    state = {"newest_generation": 0, "committed_generation": 3, "part": None, "is_ready": True}
    assert guardian.next() == {"op": "hello", "membership_state": state}
    assert guardian.next()["record"] == step  # the lost one may not have written it
    for number in range(100):
        control.publish({"number": number})
    assert [guardian.next()["record"]["number"] for _ in range(100)] == list(range(100))
    assert control.membership._pending.token.aborted and not control.token.aborted  # the generation alone is over
    guardian.lose_coordinator(is_final=True)
    with pytest.raises(GenerationEnded, match="it is gone"):
        control.token.sleep(5)
    assert control.lost_coordinator


def test_a_record_that_is_published_meanwhile_comes_after_those_that_are_repeated(monkeypatch):
    """A new coordinator takes those that are older than the newest one for written."""
    ours, theirs = socket.socketpair()
    control = ControlChannel(ours, rank=0, world_size=1, hello={"op": "hello"})
    meanwhile = threading.Thread(target=control.publish, args=({"kind": "step", "step": 3},))
    sent = []

    def send(header):
        sent.append(header)
        if header["op"] == "hello":
            meanwhile.start()
            meanwhile.join(0.2)  # it has to wait

    monkeypatch.setattr(control, "_send", send)
    for step in (1, 2):
        control.publish({"kind": "step", "step": step})
    control._lose_coordinator("the coordinator is gone", is_final=False)
    meanwhile.join(10)
    theirs.close()
    assert [header["record"]["step"] for header in sent if header["op"] == "publish"] == [1, 2, 1, 2, 3]
