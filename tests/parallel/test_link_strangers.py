"""Strangers at the port of a worker's links: whatever they do, the links go on, and nothing of them stays."""

import contextlib
import socket
import struct
import subprocess
import sys
from pathlib import Path

import torch

from parallel3d.parallel import p2p_sockets as module
from tests.support.socket_links import message, until

ROOT = Path(__file__).parents[2]


def send_and_receive(one, two):
    header, tensor = message()
    one.send(1, header, tensor)
    assert torch.equal(two.receive(0, header), tensor)


def test_strangers_leave_nothing_behind_and_are_counted(connect, monkeypatch, capsys):
    """Half-open ones, whose handshake takes too long, and ones that are reset in the middle of it."""
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.2)
    one, two = connect(2)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(connect.addresses[1]))
        for _ in range(10):
            with socket.create_connection(connect.addresses[1]) as stranger:
                stranger.sendall(b"p3d-auth")
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: two._rejections.number == 29, seconds=60.0)  # the first one was logged
    assert two._sockets == [two._listener] and not two._strangers and not two._broken
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 1 and "rejected 1 connection to the links of rank 1" in told[0] and "127.0.0.1" in told[0]
    assert two._rejections.number == 29
    send_and_receive(one, two)


def test_of_too_many_strangers_the_oldest_is_closed(connect, monkeypatch):
    monkeypatch.setattr(module, "MAX_STRANGERS", 4)
    one, two = connect(2)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(connect.addresses[1])) for _ in range(20)]
        assert strangers[0].recv(1) == b""  # closed by the other end
        until(lambda: len(two._strangers) <= 4, seconds=60.0)
        send_and_receive(one, two)
        until(lambda: len(two._strangers) <= 4, seconds=60.0)  # one may just have been accepted


OUT_OF_DESCRIPTORS = """
import os, resource, socket, time
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.p2p_sockets import SocketLinks, open_listener
from tests.support.socket_links import message

listeners = [open_listener("127.0.0.1") for _ in range(2)]
addresses = [listener.getsockname() for listener in listeners]
kept = {"generation": 0, "secret": bytes(32), "address_of": addresses.__getitem__, "slots": 2, "timeout_s": 300.0}
one, two = (SocketLinks(rank=r, listener=listeners[r], token=AbortToken(), **kept) for r in range(2))
read, write = os.pipe()
if os.fork() == 0:
    strangers = [socket.create_connection(addresses[1]) for _ in range(60)]
    os.read(read, 1)
    os._exit(0)
_, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
deadline = time.monotonic() + 300
while len(two._strangers) < 18 and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.3)  # now none is left, and others wait to be accepted
print("strangers", len(two._strangers) > 10)
os.write(write, b"x")
os.wait()
resource.setrlimit(resource.RLIMIT_NOFILE, before)
header, tensor = message(3)
one.send(1, header, tensor)
print("received", two.receive(0, header).sum().item())
os._exit(0)
"""


def test_links_go_on_once_descriptors_are_free_again():
    """In a process of its own, with a low limit: strangers take all descriptors, then go."""
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_DESCRIPTORS], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines()[-2:] == ["strangers True", "received 18.0"], done.stdout + done.stderr
