"""Readers in processes: the same tokens, a new process for one that dies, none left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from parallel3d.data import reader_process as module
from parallel3d.data.prefetch import Prefetcher
from parallel3d.data.reader import Reader
from parallel3d.data.reader_process import ReaderProcess
from parallel3d.errors import DataError, GenerationEnded
from parallel3d.parallel.abort import AbortToken
from tests.support.letter_corpus import lanes_of

pytestmark = pytest.mark.slow
TEXTS = ["abc" * number for number in range(1, 40)]


@dataclass
class FolderControlledReader(Reader):
    """Lanes that files in a folder control: they wait for a file, die, hang, or raise."""

    folder: Path

    def read(self, lane, cursor, num_tokens):
        (self.folder / f"reading-{lane}-{os.getpid()}").touch()
        while (self.folder / "hold").exists():
            time.sleep(0.005)
        if (self.folder / "die").exists():
            os._exit(9)
        if (self.folder / "refuse").exists():
            raise DataError("bad document")
        return np.arange(num_tokens + 1, dtype=np.int32) + lane, (cursor[0] + num_tokens, os.getpid(), 0)


@pytest.fixture
def make():
    made = []

    def build(reader, token=None, log=lambda text: None):
        made.append(ReaderProcess(reader, token or AbortToken(), log))
        return made[-1]

    yield build
    for process in made:
        process.close()


def wait_for(condition):
    """Waits until it is true; a minute is never needed."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_reads_what_the_lanes_read(make):
    lanes = lanes_of(TEXTS, 5, 3)
    process = make(partial(lanes_of, TEXTS, 5, 3))
    for lane in range(3):
        cursor = lanes.start(lane)
        for _ in range(4):
            tokens, after = process.read(lane, cursor, 20)
            expected, expected_after = lanes.read(lane, cursor, 20)
            assert np.array_equal(tokens, expected) and tokens.dtype == np.int32 and after == expected_after
            cursor = after
    assert process.pid != os.getpid()


def test_another_goes_on_where_one_was_killed(make, tmp_path):
    """kill -9 in the middle of a read, and once more between two."""
    logged = []
    process = make(partial(FolderControlledReader, tmp_path), log=logged.append)
    first = process.read(0, (0, 0, 0), 4)[1][1]
    (tmp_path / "hold").touch()
    done = []
    reading = threading.Thread(target=lambda: done.append(process.read(7, (4, 0, 0), 4)))
    reading.start()
    wait_for((tmp_path / f"reading-7-{first}").exists)
    os.kill(first, signal.SIGKILL)
    (tmp_path / "hold").unlink()
    reading.join(timeout=300)
    (tokens, (offset, second, _)) = done[0]
    assert tokens.tolist() == [7, 8, 9, 10, 11] and offset == 8 and second != first
    os.kill(second, signal.SIGKILL)
    assert process.read(7, (8, 0, 0), 4)[1][0] == 12
    assert [text.split(": ")[0] for text in logged] == [
        f"tokeniser process {first} has ended (SIGKILL)",
        f"tokeniser process {second} has ended (SIGKILL)",
    ]


def test_a_read_that_kills_every_process_is_an_error(make, tmp_path):
    (tmp_path / "die").touch()
    logged = []
    process = make(partial(FolderControlledReader, tmp_path), log=logged.append)
    with pytest.raises(DataError, match=r"lane 3 at \(5, 0, 0\): 3 tokeniser processes died"):
        process.read(3, (5, 0, 0), 4)
    assert len(logged) == module.MAX_DEATHS and "exit code 9" in logged[0]


def test_what_the_reader_raises_is_raised_here_and_the_process_lives(make, tmp_path):
    process = make(partial(FolderControlledReader, tmp_path))
    pid = process.read(0, (0, 0, 0), 1)[1][1]
    (tmp_path / "refuse").touch()
    with pytest.raises(DataError, match="bad document"):
        process.read(0, (0, 0, 0), 1)
    (tmp_path / "refuse").unlink()
    assert process.read(0, (0, 0, 0), 1)[1][1] == pid


def test_one_that_hangs_is_replaced(make, tmp_path, monkeypatch):
    process = make(partial(FolderControlledReader, tmp_path))
    process.read(0, (0, 0, 0), 1)
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 0.3)
    monkeypatch.setattr(module, "EXIT_TIMEOUT_S", 0.1)
    stopped = process.pid
    os.kill(stopped, signal.SIGSTOP)
    monkeypatch.setattr(process, "_log", lambda text: monkeypatch.setattr(module, "READ_TIMEOUT_S", 60.0))
    assert process.read(0, (4, 0, 0), 1)[1][0] == 5
    assert process.pid != stopped and not is_alive(stopped)


def test_an_abort_ends_the_wait_and_close_the_process(make, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EXIT_TIMEOUT_S", 0.1)
    token = AbortToken()
    process = make(partial(FolderControlledReader, tmp_path), token=token)
    process.read(0, (0, 0, 0), 1)
    (tmp_path / "hold").touch()
    threading.Timer(0.05, token.abort, ["replica (0, 1) died"]).start()
    for _ in range(2):
        with pytest.raises(GenerationEnded, match="replica"):
            process.read(0, (0, 0, 0), 1)
    pid = process.pid
    process.close()
    assert not is_alive(pid)


def test_it_minds_no_signals_of_the_terminal_and_ends_with_its_worker(tmp_path):
    """kill -9 of the worker, while its tokeniser is at work: nothing is left behind."""
    code = f"""
import os, sys, threading
sys.path[:] = {sys.path!r}
from functools import partial
from pathlib import Path
from tests.data.test_reader_process import FolderControlledReader
from parallel3d.parallel.abort import AbortToken
from parallel3d.data.reader_process import ReaderProcess
process = ReaderProcess(partial(FolderControlledReader, Path({str(tmp_path)!r})), AbortToken())
process.read(0, (0, 0, 0), 1)
print(process.pid, flush=True)
(Path({str(tmp_path)!r}) / "hold").touch()
process.read(1, (0, 0, 0), 1)
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(worker.stdout.readline())
    wait_for((tmp_path / f"reading-1-{child}").exists)
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGTERM)
    assert is_alive(child)
    worker.kill()
    worker.wait(timeout=300)
    (tmp_path / "hold").unlink()
    wait_for(lambda: not is_alive(child))


def test_processes_read_ahead_of_the_step(tmp_path):
    """While a step computes the next ones' reads are made, all of them, in processes; none is waited for."""
    token = AbortToken()
    reader_processes = [ReaderProcess(partial(FolderControlledReader, tmp_path), token) for _ in range(2)]
    prefetcher = Prefetcher(FolderControlledReader(tmp_path), 2, token, reader_processes)
    cursors, pids = {0: (0, 0, 0), 2: (0, 0, 0), 4: (0, 0, 0)}, set()
    for step in range(4):
        for lane in cursors:
            tokens, cursors[lane] = prefetcher.read(lane, cursors[lane], 8)
            assert tokens[0] == lane and cursors[lane][0] == 8 * (step + 1)
            pids.add(cursors[lane][1])
        for ahead in prefetcher._workers:  # the device computes
            ahead.thread.submit(lambda: None).result(timeout=300)
    assert (prefetcher.num_ready, prefetcher.num_waited, prefetcher.num_direct) == (9, 0, 3)
    assert pids == {os.getpid(), *(helper.pid for helper in reader_processes)}
    prefetcher.close()
    assert not any(is_alive(helper.pid) for helper in reader_processes)


def test_the_process_imports_no_torch(make):
    """Its memory and its start are those of a small program."""

    process = make(Modules)
    process.read(0, (0,), 1)
    assert "torch" not in process.read(0, (0,), 1)[1]


class Modules(Reader):
    """Returns as a cursor what the process has imported."""

    def read(self, lane, cursor, num_tokens):
        return np.zeros(num_tokens + 1, np.int32), tuple(sys.modules)
