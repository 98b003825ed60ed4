"""Fixtures of the tests of groups and links."""

import gc

import pytest

from parallel3d.parallel import p2p_sockets as module
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.p2p_sockets import SocketLinks, open_listener
from tests.support.run_secrets import SECRET
from tests.support.socket_links import open_sockets, threads_of_links, until


@pytest.fixture
def connect(monkeypatch):
    """connect(num_ranks, slots=..) -> links of all ranks, closed afterwards; leaves neither threads nor sockets."""
    monkeypatch.setattr(module, "ABORT_GRACE_S", 0.1)
    threads_before, sockets_before = threads_of_links(), open_sockets()
    made, tokens = [], []

    def make(num_ranks=2, *, slots=3, generations=None, timeout_s=10.0):
        listeners = [open_listener("127.0.0.1") for _ in range(num_ranks)]
        addresses = [listener.getsockname() for listener in listeners]
        links = []
        for rank, listener in enumerate(listeners):
            tokens.append(AbortToken())
            links.append(
                SocketLinks(
                    rank=rank,
                    secret=SECRET,
                    generation=generations[rank] if generations else 0,
                    listener=listener,
                    address_of=addresses.__getitem__,
                    slots=slots,
                    token=tokens[-1],
                    timeout_s=timeout_s,
                )
            )
        made.extend(links)
        make.tokens, make.addresses = tokens, addresses
        return links

    yield make
    for links in made:
        links.close()
    until(lambda: threads_of_links() <= threads_before)
    assert threads_of_links() <= threads_before
    gc.collect()
    until(lambda: open_sockets() <= sockets_before)  # an abort closes them on its own thread
    assert open_sockets() <= sockets_before
