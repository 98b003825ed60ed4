"""Measures the memory of processes from outside: the workers below a process, on Linux."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_WORKER = "p3d-rank-"


def peaks_of_workers(ancestor: int) -> dict[int, int]:
    """Returns the peak of the resident memory of each worker below the process `ancestor`: rank -> bytes.

    What it shares with other processes counts in each of them. Empty on systems without /proc.
    """
    peaks = {}
    for pid in _descendants(ancestor):
        with suppress(OSError, ValueError, StopIteration):  # it has ended meanwhile
            name = (_PROC / str(pid) / "comm").read_text().strip()
            if name.startswith(_WORKER):
                peaks[int(name.removeprefix(_WORKER))] = _peak(pid)
    return peaks


def available_bytes() -> int | None:
    """Bytes that new processes can take without swapping, by the kernel's estimate and the cgroup's limit; None:
    unknown."""
    with suppress(OSError, ValueError, StopIteration):
        available = _field(_PROC / "meminfo", "MemAvailable:")
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ):
            with suppress(OSError, ValueError):  # no limit is the word max
                cgroup = Path("/sys/fs/cgroup")
                available = min(available, int((cgroup / limit).read_text()) - int((cgroup / used).read_text()))
        return available
    return None


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from _descendants(child)


def _peak(pid: int) -> int:
    return _field(_PROC / str(pid) / "status", "VmHWM:")


def _field(path: Path, name: str) -> int:
    """The bytes of a line "NAME 123 kB"; raises StopIteration if it has none."""
    line = next(line for line in path.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
