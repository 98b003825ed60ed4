"""Messages over SocketLinks, and what they leave in the process: threads and sockets."""

import contextlib
import os
import threading
import time

import torch

from parallel3d.parallel.p2p_messages import Header, Kind

MIB = 1 << 20


def threads_of_links():
    return {thread.ident for thread in threading.enumerate() if thread.name.startswith("links-")}


def open_sockets():
    """The numbers of this process's sockets."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith("socket:"):
                found.add(target)
    return found


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


def message(number=0, tensor=None, **fields):
    """A header and its tensor."""
    tensor = torch.full((2, 3), float(number)) if tensor is None else tensor
    identity = {"generation": 0, "iteration": 7, "kind": Kind.ACTIVATION, "micro_batch": number, **fields}
    return Header(**identity, shape=tuple(tensor.shape), dtype=tensor.dtype), tensor


def in_thread(function, *args):
    """A started thread, and the list that will hold its error, or None when it went well."""
    result = []

    def body():
        try:
            function(*args)
            result.append(None)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            result.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, result
