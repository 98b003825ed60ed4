"""A reader in a process of its own, for tokenizers that would delay training by holding Python's lock.

The process keeps no state that matters, as each request carries the cursor. If it dies, for whatever reason, another
one gets the same request. It ends with its pipe, so that a killed worker leaves none behind; it ignores the signals
that a terminal or a cluster sends to all processes, since its worker handles them.

It is a fresh interpreter, not a fork, because the worker has threads and perhaps a GPU. It imports only what reading
needs, and not torch.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from parallel3d.data.reader import LaneCursor, Reader, ReadResult
from parallel3d.errors import DataError
from parallel3d.parallel.abort import POLL_S, AbortToken

MAX_DEATHS = 3
"""Deaths during one read after which the read itself is the cause."""
READ_TIMEOUT_S = 120.0
"""Time for one read; a process that takes longer hangs, and is killed."""
EXIT_TIMEOUT_S = 5.0


class ReaderProcess:
    """Reads in another process, for one calling thread. The process starts with the first read."""

    def __init__(
        self, make_reader: Callable[[], Reader], token: AbortToken, log: Callable[[str], None] = lambda text: None
    ):
        """`make_reader` is pickled and called in the process. `notice` reports processes that died."""
        self._make_reader = make_reader
        self._token = token
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None before the first read."""
        return self._process.pid if self._process else None

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> ReadResult:
        """Returns what the reader returns in its process, and raises what it raises; GenerationEnded after an abort.

        Raises DataError when the process dies MAX_DEATHS times during this read.
        """
        for _ in range(MAX_DEATHS):
            try:
                answer = self._request((lane, cursor, num_tokens))
            except (EOFError, OSError):  # a broken pipe: the process is dead
                self._log(f"tokeniser process {self.pid} has ended ({self._end_process()}): another takes over")
                continue
            if isinstance(answer, Exception):
                raise answer
            return answer
        raise DataError(f"lane {lane} at {tuple(cursor)}: {MAX_DEATHS} tokeniser processes died reading it")

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._end_process()

    def _request(self, request: tuple[int, LaneCursor, int]) -> ReadResult | Exception:
        self._token.check()  # the answer to an aborted request may still come
        if self._pipe is None:
            self._pipe = self._start_process()
        self._pipe.send(request)  # bounded: a few bytes, into an empty pipe
        deadline = time.monotonic() + READ_TIMEOUT_S
        while not self._pipe.poll(POLL_S):
            self._token.check()
            if time.monotonic() > deadline:
                raise EOFError(f"no answer in {READ_TIMEOUT_S:g} s")
        answer: ReadResult | Exception = self._pipe.recv()  # bounded: the answer has started, and ends with its process
        return answer

    def _start_process(self) -> Connection:
        parent_end, child_end = Pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({child_end.fileno()})"
        command = [sys.executable, "-c", code]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[child_end.fileno()])
        child_end.close()
        parent_end.send(self._make_reader)  # bounded: the process reads it at once, or ends and breaks the pipe
        return parent_end

    def _end_process(self) -> str:
        """Ends the process if it lives; returns how it ended."""
        assert self._process is not None
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = None
        try:
            self._process.wait(timeout=EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()  # bounded: it is killed
        code = self._process.returncode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def serve(descriptor: int) -> None:
    """Main function of the process: answers requests until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(descriptor)
    make_reader: Callable[[], Reader] = pipe.recv()  # bounded: ends with the worker
    reader = make_reader()
    with suppress(EOFError, OSError):  # the worker is gone
        while True:
            pipe.send(_handle_request(reader, pipe.recv()))  # bounded: ends with the worker, which waits for the answer


def _handle_request(reader: Reader, request: tuple[int, LaneCursor, int]) -> ReadResult | Exception:
    try:
        return reader.read(*request)
    except Exception as error:
        return error
