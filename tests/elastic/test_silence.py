"""A coordinator or a guardian that is silent for too long counts as lost."""

import os
import signal
import socket
import time

import pytest

from parallel3d.elastic import frame_server, frames
from parallel3d.elastic.coordinator.coordinator import Coordinator
from parallel3d.elastic.coordinator.listener import open_listener
from parallel3d.elastic.frames import FrameReader, encode_frame
from parallel3d.elastic.settings import LaunchTimeouts
from parallel3d.elastic.worker import control_channel
from parallel3d.elastic.worker.control_channel import ControlChannel
from parallel3d.errors import GenerationEnded
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from tests.support.coordinator_threads import ServingThread
from tests.support.run_secrets import SECRET, open_connection

PING_S = 0.02


@pytest.fixture
def fast_pings(monkeypatch):
    for module in (frames, frame_server, control_channel):
        monkeypatch.setattr(module, "PING_S", PING_S)


def test_a_silent_guardian_ends_its_worker(fast_pings):
    ours, _theirs = socket.socketpair()
    control = ControlChannel(ours, rank=0, world_size=1, control_s=10 * PING_S)
    with pytest.raises(GenerationEnded, match="the guardian has been silent for"):
        control.token.sleep(10)


def test_a_guardian_that_only_pings_is_there(fast_pings):
    ours, theirs = socket.socketpair()
    control = ControlChannel(ours, rank=0, world_size=1, control_s=10 * PING_S)
    for _ in range(20):
        theirs.sendall(encode_frame({"op": "ping"}))
        control.token.sleep(PING_S)
    theirs.close()


@pytest.fixture
def served(elastic_settings, fast_pings):
    """A coordinator of four workers on two guardians' bare connections; control_s of fifty pings."""
    listener = open_listener("127.0.0.1", 0)
    address, records = ("127.0.0.1", listener.getsockname()[1]), []
    coordinator = Coordinator(
        listener,
        secret=SECRET,
        world_size=4,
        emit=records.append,
        timeouts=LaunchTimeouts(control_s=50 * PING_S, abort_grace_s=0.5),
        elastic=elastic_settings(Grid.uniform(tp_size=1, pp_size=1, dp_size=4)),
    )
    serving = ServingThread(coordinator)
    guardians = [
        open_connection(
            address, {"op": "hello", "role": "guardian", "ranks": ranks, "host": "here", "address": address}
        )
        for ranks in ([0, 1], [2, 3])
    ]
    controls = [
        ControlChannel(
            open_connection(address, {"op": "hello", "role": "worker", "ranks": [rank], "host": "here", "log": ""}),
            rank=rank,
            world_size=4,
        )
        for rank in range(4)
    ]
    assert not any(control.check(["x"], AbortToken()) for control in controls)
    yield guardians, controls, records
    for control in controls:
        control.finish(0)
    for guardian in guardians:
        guardian.close()
    serving.join(5)


def test_a_silent_guardian_is_lost_with_its_workers(served):
    guardians, controls, _ = served
    guardians[1].setblocking(False)
    deadline = time.monotonic() + 300
    while not is_closed(guardians[1]) and time.monotonic() < deadline:
        guardians[0].sendall(encode_frame({"op": "ping"}))
        time.sleep(PING_S)
    assert is_closed(guardians[1]) and not any(control.token.aborted for control in controls[:2])


def is_closed(connection: socket.socket) -> bool:
    """True once the other end has closed a connection; skips what it has said before."""
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:  # closed with unread bytes
        return True
    return True


def test_frames_of_every_kind_count_as_signs_of_life(served):
    guardians, controls, _ = served
    for _ in range(75):
        for guardian in guardians:
            guardian.sendall(encode_frame({"op": "ended", "ends": []}))
        time.sleep(PING_S)
    assert not any(control.token.aborted for control in controls)


def test_pings_reach_workers_and_guardians(served):
    guardians, _, _ = served
    guardians[0].settimeout(10)
    reader, seen = FrameReader(), set()
    while "ping" not in seen:
        guardians[1].sendall(encode_frame({"op": "ping"}))
        seen |= {header["op"] for header, _ in reader.feed(guardians[0].recv(65536))}


def test_a_process_that_was_stopped_itself_blames_no_other_one(fast_pings):
    """Silence is counted in the listener's own turns, not by the clock."""
    ours, theirs = socket.socketpair()
    control = ControlChannel(ours, rank=0, world_size=1, control_s=1000 * PING_S)
    child = os.fork()
    if child == 0:  # continues this process after ten times the limit
        time.sleep(0.5)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    control._control_s = 10 * PING_S
    theirs.sendall(encode_frame({"op": "ping"}))
    os.kill(os.getpid(), signal.SIGSTOP)
    theirs.sendall(encode_frame({"op": "ping"}))
    assert not control.token.aborted
    os.waitpid(child, 0)
    theirs.close()
