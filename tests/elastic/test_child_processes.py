"""The link between the stub and its children, at its child's end: a stub that is stopped loses nothing that counts."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from parallel3d.elastic.child_processes import ChildProcess, ParentLink
from parallel3d.elastic.frames import FrameReader
from tests.support.processes import wait_for

PLAN = "x" * 100_000
"""A plan of some 1,250 guardians."""


@pytest.fixture
def link() -> Iterator[tuple[ParentLink, socket.socket]]:
    stub, child = socket.socketpair()
    with stub, child:
        yield ParentLink(child, memoryview(bytearray(8)).cast("d")), stub


def read_all(stub: socket.socket) -> list[dict]:
    """What a stub reads once it goes on, up to the message `ended`."""
    reader, messages = FrameReader(), []
    while not messages or messages[-1]["op"] != "ended":
        messages += [header for header, _ in reader.feed(stub.recv(2**16))]
    return messages


def test_a_stub_that_is_stopped_is_not_waited_for_and_gets_the_newest_of_each(link):
    child, stub = link
    child.send({"op": "located", "number": 0})
    for number in range(100):  # far more than the socket takes
        child.send({"op": "failover_plan", "number": number, "plan": PLAN})
    child.send({"op": "ended", "exit_code": 5})
    thread = threading.Thread(target=child.drain)
    thread.start()
    messages = read_all(stub)
    thread.join()
    plans = [message["number"] for message in messages if message["op"] == "failover_plan"]
    assert messages[0] == {"op": "located", "number": 0}
    assert plans == sorted(plans) and plans[-1] == 99 and len(plans) < 10, plans
    assert messages[-1] == {"op": "ended", "exit_code": 5}


def test_what_was_not_taken_follows_with_a_beat(link):
    child, stub = link
    for number in range(20):
        child.send({"op": "failover_plan", "number": number, "plan": PLAN})
    child.send({"op": "ended"})
    reader, seen = FrameReader(), []
    while not seen or seen[-1]["op"] != "ended":
        seen += [header for header, _ in reader.feed(stub.recv(2**20))]
        child.beat()
    assert seen[-2]["number"] == 19


def test_a_stub_that_is_gone_is_not_waited_for(link):
    child, stub = link
    for number in range(20):
        child.send({"op": "failover_plan", "number": number, "plan": PLAN})
    stub.close()
    child.drain()
    child.send({"op": "ended"})
    child.drain()


def test_a_killed_child_has_ended():
    def stay(link: ParentLink) -> int:
        link.beat()
        signal.pause()
        return 0

    child = ChildProcess("test", stay)
    wait_for(lambda: child._slot[0] != 0.0, "the child's first beat")
    child.signal(signal.SIGSTOP)
    child.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    child.connection.close()
