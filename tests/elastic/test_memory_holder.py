"""The process that shares a worker's memory: a killed worker is reported while it still has the memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallel3d.elastic.worker import memory_holder
from parallel3d.elastic.worker.memory_holder import memory_held
from tests.support.processes import wait_for

MIB = 1 << 20
OWNER = """
import sys, threading, time
from parallel3d.elastic.worker import memory_holder
from parallel3d.elastic.worker.memory_holder import memory_held
memory_holder.LONGEST_S = float(sys.argv[1])
memory = bytearray(64 << 20)
threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
with memory_held() as holder:
    print(holder, flush=True)
    for line in sys.stdin:
        print(eval(line), flush=True)
"""
ENDING = """
from pathlib import Path
from parallel3d.elastic.worker.memory_holder import memory_held
try:
    with memory_held() as holder:
        print(Path(f"/proc/{holder}").exists())
        END
finally:
    print(Path(f"/proc/{holder}").exists(), flush=True)
"""


def has_holders() -> bool:
    with memory_held() as holder:
        return holder is not None


pytestmark = pytest.mark.skipif(not has_holders(), reason="no Linux of 5.9 or later, or no C compiler")


@contextmanager
def started(longest_s=600):
    """A process with a holder; yields both, the holder by its number."""
    command = [sys.executable, "-c", OWNER, str(longest_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        try:
            yield owner, int(owner.stdout.readline())
        finally:
            owner.kill()


def ask(owner, expression):
    owner.stdin.write(expression + "\n")
    owner.stdin.flush()
    return owner.stdout.readline().strip()


def status(pid):
    """The fields of /proc/PID/status, none if there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def resident_bytes(pid):
    return int(status(pid)["VmRSS"].split()[0]) << 10


def is_gone(pid):
    return status(pid).get("State", "Z").startswith("Z")


def wait_until_dead(process):
    """Until the kernel reports the end of a child, which is not reaped yet."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # bounded: it has been killed


def test_a_killed_process_is_reported_before_its_memory_is_freed():
    with started() as (owner, holder):
        owner.kill()
        wait_until_dead(owner)
        left = status(holder)
        assert left["Name"] == "p3d-memory" and resident_bytes(holder) > 64 * MIB
        assert "VmRSS" not in status(owner.pid)
        assert owner.wait() == -signal.SIGKILL
        wait_for(lambda: is_gone(holder), "the end of the holder")


def test_a_dead_process_that_nobody_reaps_does_not_keep_its_memory():
    with started(memory_holder.LONGEST_S) as (owner, holder):
        owner.kill()
        wait_until_dead(owner)
        wait_for(lambda: is_gone(holder), "the end of the holder")


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)", "raise ValueError"])
def test_a_process_that_ends_by_itself_ends_its_holder_first(end):
    source = ENDING.replace("END", end)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["True", "False"], done.stdout + done.stderr
    assert done.returncode == {"pass": 0, "raise SystemExit(3)": 3}.get(end, 1)


def test_it_has_no_files_and_hears_no_signal_of_its_group():
    with started() as (owner, holder):
        assert os.listdir(f"/proc/{holder}/fd") == []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGRTMAX):
            os.kill(holder, number)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(holder, number)
        assert ask(owner, "sum(range(100_000))") == "4999950000"
        assert not is_gone(holder)
        owner.kill()
        wait_until_dead(owner)
        assert "VmRSS" in status(holder)


def test_one_that_is_stopped_does_not_outlive_its_owner():
    with started() as (owner, holder):
        os.kill(holder, signal.SIGSTOP)
        wait_for(lambda: status(holder)["State"].startswith("T"), "the holder's stop")
        owner.kill()
        owner.wait()
        wait_for(lambda: is_gone(holder), "the end of the holder")


def test_it_shares_what_its_owner_allocates_later():
    with started() as (owner, holder):
        before = resident_bytes(holder)
        assert ask(owner, "globals().update(more=bytearray(b'x') * (32 << 20))") == "None"
        assert resident_bytes(holder) >= before + 31 * MIB
        assert ask(owner, "(len(more), __import__('subprocess').run(['true']).returncode)") == f"({32 * MIB}, 0)"


def test_an_owner_without_its_holder_goes_on_and_ends():
    with started() as (owner, holder):
        os.kill(holder, signal.SIGKILL)
        assert ask(owner, "sum(range(100_000))") == "4999950000"
        owner.communicate("")
        assert owner.returncode == 0
        assert is_gone(holder)


def test_threads_have_none():
    found = []

    def look():
        with memory_held() as holder:
            found.append(holder)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [None]


def test_without_a_compiler_there_is_none(monkeypatch):
    monkeypatch.setattr(memory_holder, "loop_library", lambda source: None)
    with memory_held() as holder:
        assert holder is None


def test_other_systems_have_none(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with memory_held() as holder:
        assert holder is None
