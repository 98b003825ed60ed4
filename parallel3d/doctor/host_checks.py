"""Checks of this host: memory between processes, open files, cores and threads, network, disk, clock.

Each function takes what it looks at, so that tests can hand it a real fault, and yields findings.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from parallel3d.doctor.finding import Finding, Level
from parallel3d.elastic.guardian.open_files import num_files_needed
from parallel3d.parallel.grid import Grid

MIN_SHARED_BYTES = 1 << 30
"""NCCL's rings between the GPUs of one host take some tens of MB for each; Docker's default is 64 MiB in all."""
MIN_OPEN_FILES = 1024
LOOKUP_S, MAX_LOOKUP_S = 1.0, 10.0
CONNECT_S = 5.0
MAX_SKEW_S = 5.0
FIRST_SECOND = 1_700_000_000
"""November 2023: a clock before it was never set."""


def check_shared_memory(folder: Path) -> Iterator[Finding]:
    """Free space of /dev/shm; the project's own memory between processes (memfd) does not need the folder."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        text, fix = f"{folder}: {error.strerror}", "mount it (docker run --shm-size 8g): NCCL exchanges through it"
        yield Finding(topic="shared memory", level="warning", text=text, fix=fix)
        return
    text = f"{free / 2**20:,.0f} MiB free in {folder}"
    if free < MIN_SHARED_BYTES:
        fix = "NCCL needs more with several GPUs: docker run --shm-size 8g, or --ipc=host; on CPUs it is enough"
        yield Finding(topic="shared memory", level="warning", text=text, fix=fix)
    else:
        yield Finding(topic="shared memory", text=text)


def check_open_files(grid: Grid | None) -> Iterator[Finding]:
    """The limit of open files against what a run with this grid needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MIN_OPEN_FILES if grid is None else num_files_needed(grid)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        limit = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,} (hard limit)"
        yield Finding(topic="open files", text=f"{limit}; {needed:,} needed")
        return
    level: Level = "warning" if grid is None else "problem"
    fix = f"ulimit -Hn {needed}, or LimitNOFILE of the service that starts the run"
    yield Finding(topic="open files", level=level, text=f"hard limit {hard:,}; {needed:,} needed", fix=fix)


def check_threads(variables: Mapping[str, str], *, quota: float | None, num_workers: int | None) -> Iterator[Finding]:
    """Cores that this process may use, against what a run will take; `quota` is the cgroup's, in cores."""
    cores, seen = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    taken = min(seen, max(1, int(quota or seen)))
    usable = min(cores, quota or cores)
    text = f"{cores} of {seen} cores" + (f", of which the cgroup allows the time of {quota:g}" if quota else "")
    if usable < taken:
        fix = (
            f"a run takes {taken} cores' worth of threads, and {usable:g} can work: set run.threads_per_rank to "
            f"{max(1, int(usable // (num_workers or 1)))}" + ("" if num_workers else " for one worker")
        )
        yield Finding(topic="cores", level="warning", text=text, fix=fix)
    else:
        yield Finding(topic="cores", text=text)
    words = variables.get("OMP_NUM_THREADS")
    if words is None:
        return
    if not words.split(",")[0].isdigit() or int(words.split(",")[0]) < 1:
        fix = "unset it, or set a positive number; training sets its own threads (run.threads_per_rank)"
        yield Finding(topic="OMP_NUM_THREADS", level="problem", text=f"{words!r} is not a positive number", fix=fix)
    elif int(words.split(",")[0]) > seen:
        fix = f"{seen} cores are here: unset it"
        yield Finding(topic="OMP_NUM_THREADS", level="warning", text=words, fix=fix)
    else:
        yield Finding(topic="OMP_NUM_THREADS", text=f"{words}; training sets its own threads (run.threads_per_rank)")


def check_name(name: str, *, one_host: bool) -> Iterator[Finding]:
    """Whether and how fast this host's own name is resolved, and a connection to its address."""
    answers: list[str | OSError] = []

    def look_up() -> None:
        try:
            answers.append(str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]))
        except OSError as error:
            answers.append(error)

    thread, started = threading.Thread(target=look_up, daemon=True), time.monotonic()
    thread.start()
    thread.join(MAX_LOOKUP_S)
    seconds = time.monotonic() - started
    mend = f"add '127.0.1.1 {name}' to /etc/hosts, or mend the resolver (/etc/resolv.conf)"
    unneeded = "; runs on this host alone do not need it" if one_host else ""
    level: Level = "warning" if one_host else "problem"
    if not answers:
        yield Finding(topic="own name", level=level, text=f"{name}: no answer in {seconds:.0f} s{unneeded}", fix=mend)
    elif isinstance(answers[0], OSError):
        yield Finding(topic="own name", level=level, text=f"{name}: {answers[0].strerror}{unneeded}", fix=mend)
    elif seconds > LOOKUP_S:
        yield Finding(topic="own name", level="warning", text=f"{name}: answered after {seconds:.1f} s", fix=mend)
    elif not one_host and answers[0].startswith("127."):
        fix = "other hosts need another address: set MASTER_ADDR to the one of rank 0's host"
        yield Finding(topic="own name", level="warning", text=f"{name} is {answers[0]}, the loopback", fix=fix)
    else:
        yield Finding(topic="own name", text=f"{name} is {answers[0]}")


def check_ports(address: str, port: int | None) -> Iterator[Finding]:
    """A connection of this host with itself, and `port`, at which rank 0 is to listen here."""
    try:
        with socket.create_server((address, 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=CONNECT_S).close()
        yield Finding(topic="ports", text=f"{address} accepts connections")
    except OSError as error:
        fix = f"a firewall or a missing interface: allow connections of this host with itself ({address})"
        yield Finding(topic="ports", level="problem", text=f"no connection by {address} ({error})", fix=fix)
    if port is None:
        return
    try:
        socket.create_server(("", port)).close()
        yield Finding(topic="MASTER_PORT", text=f"{port} is free")
    except OSError as error:
        fix = "set MASTER_PORT to another one, the same for all ranks"
        yield Finding(topic="MASTER_PORT", level="problem", text=f"{port}: {error.strerror}", fix=fix)


def check_folder(folder: Path, num_bytes: int | None) -> Iterator[Finding]:
    """Whether a run can write into `folder` or make it, its free space against `num_bytes`, and its clock."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            file.write(b"x")
            file.flush()
            skew = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError as error:
        fix = "set run.directory (and checkpoint.directory) to a folder that can be written to"
        yield Finding(topic="run folder", level="problem", text=f"{existing}: {error.strerror}", fix=fix)
        return
    free = shutil.disk_usage(existing).free
    text = f"{free / 1e9:,.1f} GB free for {folder}"
    if num_bytes is not None and free < num_bytes:
        fix = "free some, lower checkpoint.keep_last, or set checkpoint.directory to another disk"
        text += f"; the checkpoints take up to {num_bytes / 1e9:,.1f} GB"
        yield Finding(topic="disk", level="problem", text=text, fix=fix)
    else:
        yield Finding(topic="disk", text=text)
    yield from check_clock(time.time(), skew)


def check_clock(now: float, skew: float) -> Iterator[Finding]:
    """This host's clock, and how far the one of the run folder's file server is ahead of it."""
    if now < FIRST_SECOND:
        text, fix = time.strftime("%Y-%m-%d", time.gmtime(now)), "set it (timedatectl set-ntp true)"
        yield Finding(topic="clock", level="problem", text=text, fix=fix)
    elif abs(skew) > MAX_SKEW_S:
        text = f"the run folder's file server is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}"
        fix = "synchronise the clocks (timedatectl set-ntp true): times in logs of several hosts do not compare"
        yield Finding(topic="clock", level="warning", text=text, fix=fix)
    else:
        yield Finding(topic="clock", text=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))
