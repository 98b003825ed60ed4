"""Lets a worker's death be noticed before the kernel has freed its memory.

The kernel frees a process's memory first and reports its death after that: 0.02 s for a small worker and 0.08 s for
each GiB of host memory, longer where others want the cores. So a worker shares its memory with a process
that does nothing else (memory_holder.c): a worker that is killed is reported within a millisecond, and what it had is
freed in the holder a moment later. A worker that ends by itself ends its holder first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from parallel3d.compiled_loops import loop_library

_SOURCE = Path(__file__).with_suffix(".c")
LONGEST_S = 0.2
"""How long a holder may outlive a worker that is not reaped: its guardian may be dead."""
WCLONE = -(1 << 31)
"""Option of waitpid, for children that report nothing when they end."""


@contextlib.contextmanager
def memory_held() -> Iterator[int | None]:
    """Has a holder share this process's memory while the block runs; yields its number, None where there is none: not
    on Linux, without a C compiler, or in a thread, which may end before the process does."""
    holder = _start_holder()
    try:
        yield holder
    finally:
        if holder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(holder, WCLONE)  # bounded: SIGKILL ends a process


def _start_holder() -> int | None:
    is_main = threading.current_thread() is threading.main_thread()
    library = loop_library(_SOURCE) if is_main and sys.platform.startswith("linux") else None
    holder = -1 if library is None else int(library.start_holder(ctypes.c_uint64(int(1e9 * LONGEST_S))))
    return None if holder < 0 else holder
