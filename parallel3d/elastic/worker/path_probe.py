"""Probes whether the kernels of other hosts answer: short TCP connects, nothing is sent.

A refused connection is an answer, too: the port may belong to a generation that is over. Each attempt is one SYN, so
that a network that loses packets still answers one of many.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Collection, Mapping, Sequence

from parallel3d.elastic.protocol.membership import Address
from parallel3d.parallel.tree_place import tree_place

MAX_PROBED = 32
"""Hosts that one worker probes in a round."""
ATTEMPT_S = 1.0
_ANSWERS = (0, errno.ECONNREFUSED)


def likely_first(own: int, peers: Sequence[int]) -> list[int]:
    """Returns the peers, first those that trees (tree_place.py) talk to, then rings: at distances of powers of two."""
    ring = sorted({*peers, own})
    at = ring.index(own)
    place = tree_place(at, len(ring))

    def order(index: int) -> tuple[bool, bool, int]:
        distance = min((index - at) % len(ring), (at - index) % len(ring))
        return index not in (place.parent, *place.children), distance & (distance - 1) != 0, distance

    return [ring[index] for index in sorted(range(len(ring)), key=order) if index != at]


def unreachable_ranks(peers: Sequence[int], addresses: Mapping[int, Address], *, timeout_s: float) -> list[int]:
    """Returns those of `peers` whose hosts did not answer within `timeout_s`; at most `MAX_PROBED` hosts are asked."""
    by_host: dict[str, int] = {}
    for rank in peers:
        if rank in addresses and len(by_host) < MAX_PROBED:
            by_host.setdefault(addresses[rank][0], rank)
    silent = set(by_host.values())
    deadline = time.monotonic() + timeout_s
    while silent and (left_s := deadline - time.monotonic()) > 0:
        silent -= _answering(silent, addresses, timeout_s=min(ATTEMPT_S, left_s))
    return sorted(silent)


def _answering(ranks: Collection[int], addresses: Mapping[int, Address], *, timeout_s: float) -> set[int]:
    """The ranks whose hosts answer one connect each; it always takes the time if one does not.

    Answers that have arrived while this process got no core count, although the time is over.
    """
    answering: set[int] = set()
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for rank in ranks:
            probe = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.setblocking(False)
            with contextlib.suppress(OSError):  # no route at present, or a name that is not known
                if probe.connect_ex(addresses[rank]) in (*_ANSWERS, errno.EINPROGRESS):
                    selector.register(probe, selectors.EVENT_WRITE, rank)
        left_s = timeout_s
        while selector.get_map() and left_s > 0:
            left_s = max(0.0, deadline - time.monotonic())
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:  # type: ignore[union-attr]
                    answering.add(key.data)
    time.sleep(0.0 if len(answering) == len(ranks) else max(0.0, deadline - time.monotonic()))
    return answering
