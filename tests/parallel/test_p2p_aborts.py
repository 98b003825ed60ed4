"""An abort wakes all that wait on a link: senders, receivers, ranks that wait for a peer's address."""

import socket
import threading
import time

import pytest
import torch

from parallel3d.errors import GenerationEnded
from parallel3d.parallel import p2p_sockets as module
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.p2p_sockets import SocketLinks, open_listener
from tests.support.run_secrets import SECRET, enter
from tests.support.socket_links import MIB, in_thread, message, threads_of_links, until


def test_an_abort_in_the_middle_of_a_big_message_wakes_the_sender(connect):
    """Its peer has accepted the connection and reads nothing."""
    one, _ = connect(2, slots=1, timeout_s=60.0)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        connect.addresses[1] = deaf.getsockname()
        header, big = message(0, torch.zeros(16 * MIB))
        thread, result = in_thread(lambda: [one.send(1, header, big) for _ in range(2)])
        time.sleep(0.3)
        assert thread.is_alive()
        assert_abort_wakes(connect.tokens[0], thread, result)


def test_an_abort_in_the_middle_of_a_big_message_wakes_the_receiver(connect):
    """Its peer has sent half of a message and falls silent."""
    _, two = connect(2, timeout_s=60.0)
    header, big = message(0, torch.zeros(MIB))
    with enter(connect.addresses[1]) as peer:
        peer.sendall(module._HELLO.pack(0, 0, False) + header.pack() + bytes(header.num_bytes // 2))
        thread, result = in_thread(two.receive, 0, header)
        time.sleep(0.3)
        assert thread.is_alive()
        assert_abort_wakes(connect.tokens[1], thread, result)


def assert_abort_wakes(token, thread, result):
    """The caller's thread and the connection's own, long before their timeout."""
    running = threads_of_links()
    started = time.monotonic()
    token.abort("replica (0, 1) died")
    thread.join(timeout=300)
    (error,) = result
    assert isinstance(error, GenerationEnded) and str(error) == "replica (0, 1) died"
    until(lambda: len(threads_of_links()) <= len(running) - 2)  # the listener's and the connection's
    assert time.monotonic() - started < 30


def test_an_abort_wakes_one_that_waits_for_nobody_yet(connect):
    one, _ = connect(2, timeout_s=60.0)
    threading.Timer(0.1, connect.tokens[0].abort, ["over"]).start()
    started = time.monotonic()
    with pytest.raises(GenerationEnded, match="over"):
        one.receive(1, message()[0])
    assert time.monotonic() - started < 30
    with pytest.raises(GenerationEnded, match="over"):
        one.receive(1, message()[0])


def test_an_abort_while_the_address_is_not_known_yet(connect):
    token = AbortToken()

    def address_of(rank):
        token.sleep(60.0)

    listener = open_listener("127.0.0.1")
    links = SocketLinks(
        rank=0,
        secret=SECRET,
        generation=0,
        listener=listener,
        address_of=address_of,
        slots=1,
        token=token,
        timeout_s=60.0,
    )
    links.send(1, *message())
    threading.Timer(0.1, token.abort, ["over"]).start()
    started = time.monotonic()
    with pytest.raises(GenerationEnded, match="over"):
        links.send(1, *message(1))
    links.close()
    assert time.monotonic() - started < 30
