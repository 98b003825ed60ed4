"""Memory that the ranks of a group share, if all of them are processes of one host.

Anonymous memory of the first rank, which the others map through /proc: it has no name that a killed process could leave
behind, no file system limits it, and it is gone with the last process that maps it. Whether ranks share a host is found
out by doing it: a process of another host, or of another container, does not find the proof that the first rank has
written there. Then all do without.

    head of HEAD_BYTES: the proof | a row of counters for each rank | slots of rank 0 | slots of rank 1 | ...
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import Store

from parallel3d.compiled_loops import call_loop, loop_library

SLOT_BYTES = 1 << 20
NUM_SLOTS = 8
HEAD_BYTES = 4096
ROW_BYTES = 256
PROOF_BYTES = 32
_NAME = "parallel3d-exchange"
_SOURCE = Path(__file__).with_suffix(".c")


class SharedCounter(IntEnum):
    """Numbers that a rank counts for its peers."""

    WRITTEN = 0
    """Chunks in its slots."""
    READ = 1
    """Chunks of all ranks that it needs no longer."""


class WaitEnd(IntEnum):
    """The end of a wait."""

    READY = 0
    ABORTED = 1
    LATE = 2


class SharedMemory:
    """The counters and slots of a group's ranks, as `rank` of `size` sees them."""

    def __init__(self, memory: mmap.mmap, *, rank: int, size: int):
        library = loop_library(_SOURCE)
        assert library is not None, "shared memory without a C compiler"
        self._library = library
        self._rank = rank
        self._size = size
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        start = HEAD_BYTES + size * ROW_BYTES
        self._rows = whole[HEAD_BYTES:start]
        self._slots = whole[start:].view(size, NUM_SLOTS, SLOT_BYTES)

    def slot(self, rank: int, chunk: int, dtype: torch.dtype) -> Tensor:
        """A rank's slot for the chunk of this number, as elements of `dtype`."""
        return self._slots[rank, chunk % NUM_SLOTS].view(dtype)

    def publish(self, counter: SharedCounter, number: int) -> None:
        """Sets this rank's counter and wakes the peers that wait."""
        call_loop(self._library, "publish", self._rows, self._size, self._rank, counter, number)

    def wait(
        self, counter: SharedCounter, at_least: int, switch: WaitSwitch, *, spin_s: float = 0.0, limit_s: float = 0.0
    ) -> WaitEnd:
        """Waits until this counter of every rank has reached a number: spins, then sleeps."""
        wait_for_all = self._library.wait_for_all
        wait_for_all.restype = ctypes.c_uint64
        return WaitEnd(
            wait_for_all(
                ctypes.c_void_p(self._rows.data_ptr()),
                *map(ctypes.c_uint64, (self._size, self._rank, counter, at_least)),
                ctypes.byref(switch.is_aborted),
                *map(ctypes.c_uint64, (int(1e9 * spin_s), int(1e9 * limit_s))),
            )
        )

    def wake(self) -> None:
        """Lets this rank's wait look at its switch."""
        call_loop(self._library, "wake", self._rows, self._rank)


class WaitSwitch:
    """Ends this rank's waits that are given it, from now on: the abort token of one generation, as C sees it."""

    def __init__(self, memory: SharedMemory):
        self._memory = memory
        self.is_aborted = ctypes.c_uint32(0)

    def abort(self) -> None:
        self.is_aborted.value = 1
        self._memory.wake()


def share_memory(store: Store, name: str, *, rank: int, size: int, timeout: timedelta) -> SharedMemory | None:
    """Maps memory together with the other ranks, which meet in `store` under a name that is used once; None, on all of
    them, if any of them can't."""
    key = f"{name}/memory"
    num_bytes = HEAD_BYTES + size * (ROW_BYTES + NUM_SLOTS * SLOT_BYTES)
    with _offered(store, key, num_bytes) if rank == 0 else _found(store, key, num_bytes, timeout) as memory:
        has_all = memory is not None and loop_library(_SOURCE) is not None
        store.set(f"{key}/{rank}", "yes" if has_all else "no")
        keys = [f"{key}/{each}" for each in range(size)]
        store.wait(keys, timeout)
        if memory is None or any(store.get(key) != b"yes" for key in keys):
            return None
        return SharedMemory(memory, rank=rank, size=size)


@contextmanager
def _offered(store: Store, key: str, num_bytes: int) -> Iterator[mmap.mmap | None]:
    """New memory, which others can find while the block runs."""
    try:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # not Linux
        store.set(key, "")
        yield None
        return
    try:
        os.ftruncate(descriptor, num_bytes)
        memory, proof = mmap.mmap(descriptor, num_bytes), secrets.token_bytes(PROOF_BYTES)
        memory[:PROOF_BYTES] = proof
        store.set(key, f"/proc/{os.getpid()}/fd/{descriptor} {proof.hex()}")
        yield memory
    finally:
        os.close(descriptor)


@contextmanager
def _found(store: Store, key: str, num_bytes: int, timeout: timedelta) -> Iterator[mmap.mmap | None]:
    """The memory that the first rank offers."""
    store.wait([key], timeout)
    path, _, proof = store.get(key).decode().partition(" ")
    memory = None
    with suppress(OSError, ValueError):
        if path and os.readlink(path).startswith(f"/memfd:{_NAME}"):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = mmap.mmap(descriptor, num_bytes)
            finally:
                os.close(descriptor)
    yield memory if memory is not None and memory[:PROOF_BYTES].hex() == proof else None
