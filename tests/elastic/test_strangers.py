"""Connections without the run's secret change nothing: they are closed before a frame is parsed."""

import contextlib
import hashlib
import random
import socket
import stat
import struct
import threading

import pytest

from parallel3d.elastic.coordinator.connections import ConnectionServer
from parallel3d.elastic.coordinator.listener import open_listener
from parallel3d.elastic.frames import FrameReader, encode_frame
from parallel3d.elastic.guardian.launcher_env import read_launcher_env
from parallel3d.elastic.guardian.run_secret import FILE_NAME, RunSecret
from parallel3d.errors import ProtocolError
from parallel3d.handshake import (
    NONCE_BYTES,
    PROOF_BYTES,
    REQUEST,
    AcceptedHandshake,
    NotOfThisRunError,
    connect_handshake,
    new_secret,
)
from parallel3d.parallel.abort import AbortToken
from parallel3d.rejections import REPORT_EVERY_S, Rejections
from tests.support.run_secrets import SECRET, enter

OPS = ("hello", "publish", "error", "finish", "announce_drain", "set", "report", "confirm", "suspect", "ended", "stop")
FRAMES = [encode_frame({"op": op, "role": "guardian", "ranks": [0, 1], "signal": 15, "at_once": True}) for op in OPS]
NOISE = random.Random(1).randbytes(1000)
GARBAGE = [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, struct.pack(">II", 2**32 - 1, 2**32 - 1), NOISE]


@contextlib.contextmanager
def in_thread(function):
    """Runs `function` on a thread during the block, and waits for it."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    yield
    thread.join(timeout=300)
    assert not thread.is_alive()


def is_closed(connection: socket.socket) -> bool:
    """Waits until the other end has closed it; anything that it says before is skipped."""
    connection.settimeout(10)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:  # closed with unread bytes
        return True
    return True


def assert_serves(connect) -> None:
    """The run's own workers work."""
    control = connect(0)
    control.set("key", b"1")
    assert control.get("key", AbortToken()) == b"1" and not control.token.aborted and not control.stop_requested


@pytest.mark.parametrize("words", [*GARBAGE, *FRAMES], ids=lambda words: repr(words[:24]))
def test_words_without_a_handshake(world, words):
    address, connect, _, records = world
    with socket.create_connection(address) as stranger:
        stranger.sendall(words)
        assert is_closed(stranger)
    assert_serves(connect)


def test_a_wrong_secret_is_refused_by_both_ends(world):
    address, connect, _, _ = world
    with pytest.raises(NotOfThisRunError):
        enter(address, b"another secret")
    with socket.create_connection(address, timeout=10) as stranger:  # one that goes on regardless
        stranger.sendall(REQUEST + bytes(NONCE_BYTES))
        assert len(stranger.recv(NONCE_BYTES + PROOF_BYTES)) == NONCE_BYTES + PROOF_BYTES
        stranger.sendall(bytes(PROOF_BYTES) + FRAMES[0])
        assert is_closed(stranger)
    assert_serves(connect)


def test_a_recorded_handshake_proves_nothing_later(world):
    address, connect, _, _ = world
    recorded = bytearray()

    class Recorder:
        """A socket that writes down what is sent."""

        def __init__(self, connection):
            self.connection = connection

        def sendall(self, data):
            recorded.extend(data)
            self.connection.sendall(data)

        def recv(self, size):
            return self.connection.recv(size)

    with socket.create_connection(address, timeout=10) as own:
        connect_handshake(Recorder(own), SECRET)
    with socket.create_connection(address) as stranger:
        stranger.sendall(recorded + FRAMES[0])
        assert is_closed(stranger)
    assert_serves(connect)


def test_hundreds_that_say_nothing(world):
    address, connect, _, _ = world
    with contextlib.ExitStack() as stack:
        for number in range(300):
            stranger = stack.enter_context(socket.create_connection(address, timeout=10))
            stranger.sendall(REQUEST[: number % len(REQUEST)])
        assert_serves(connect)


def test_all_connections_that_wait_are_accepted_in_one_turn():
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(open_listener("127.0.0.1", 0))
        server = ConnectionServer(listener, secret=SECRET, control_s=30.0, on_message=ignore, on_lost=ignore)
        for _ in range(50):
            stack.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
        server.poll(10.0)
        with pytest.raises(BlockingIOError):
            listener.accept()
        server.close()


def ignore(*arguments: object) -> None:
    pass


def test_bytes_of_a_handshake_may_come_one_by_one():
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    handshake = AcceptedHandshake(SECRET)

    def accept():
        while not handshake.is_proven:
            if reply := handshake.feed(theirs.recv(1)):
                theirs.sendall(reply)

    with in_thread(accept):
        connect_handshake(ours, SECRET)
        ours.sendall(b"next")
    assert theirs.recv(100) == b"next"


def test_a_frame_nested_too_deeply_is_not_a_frame():
    text = b"[" * 100_000
    with pytest.raises(ProtocolError, match="not a control frame"):
        list(FrameReader().feed(struct.pack(">II", len(text), 0) + text))


def test_rejections_are_reported_once_a_minute_and_at_the_end():
    rejections = Rejections(to="the coordinator")
    assert rejections.report(0.0) == ""
    rejections.add("10.0.0.7")
    assert "rejected 1 connection to" in rejections.report(0.0)
    for _ in range(3):
        rejections.add("10.0.0.8")
    assert rejections.report(REPORT_EVERY_S - 1) == ""
    assert "rejected 3 connections" in (text := rejections.report(REPORT_EVERY_S)) and "from 10.0.0.8" in text
    rejections.add("10.0.0.9")
    assert "rejected 1 connection to" in rejections.report(REPORT_EVERY_S, is_last=True)
    assert rejections.report(REPORT_EVERY_S, is_last=True) == ""


@pytest.mark.parametrize(("words", "num_rejected"), [(REQUEST + bytes(NONCE_BYTES), 0), (b"", 1), (b"?", 1)])
def test_those_that_gave_up_before_there_was_a_server_are_not_reported(words, num_rejected):
    """As guardians do that look for a coordinator which has not taken over yet."""
    listener = open_listener("127.0.0.1", 0)
    with socket.create_connection(listener.getsockname()) as connection:
        connection.sendall(words)
    settings = dict(secret=SECRET, control_s=30.0, on_message=lambda *frame: None, on_lost=lambda connection: None)
    server = ConnectionServer(listener, **settings)
    for _ in range(4):
        server.poll(0.05)
    server.close()
    assert server.rejections.number == num_rejected


def launcher(rank: int, **variables: str):
    return read_launcher_env(
        {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "4242", **variables}
    )


def test_processes_of_a_launcher_share_a_file_that_only_the_user_may_read(tmp_path):
    other = RunSecret(launcher(1), tmp_path)
    with pytest.raises(NotOfThisRunError, match=FILE_NAME):
        other.read()
    (tmp_path / FILE_NAME).write_bytes(new_secret())  # of an earlier run
    stale = other.read()
    maker = RunSecret(launcher(0), tmp_path)
    assert other.read() == maker.read() != stale
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600


def test_a_given_secret_needs_no_file(tmp_path):
    secrets = {RunSecret(launcher(rank, PARALLEL3D_SECRET="ours"), tmp_path).read() for rank in range(2)}
    assert secrets == {hashlib.sha256(b"ours").digest()} and not list(tmp_path.iterdir())


def test_with_a_store_of_the_launcher_there_is_no_file(tmp_path):
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert RunSecret(launcher(0, **agent), tmp_path).read() and not list(tmp_path.iterdir())
    with pytest.raises(NotOfThisRunError):
        RunSecret(launcher(1, **agent), tmp_path).read()
