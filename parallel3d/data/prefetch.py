"""Tokenisation ahead of training: the same results as `Lanes.read`, ready before they are requested.

A lane is read in order, so after each read the next ones are known. Background threads make them, `depth` steps ahead
for every lane that has been asked for; a read that was predicted takes the result, or waits when it is being made, and
any other read is computed on the spot. Timing decides where a read is computed, never its result.

    one thread          lanes           -> thread
    data.num_processes  lanes 0, 2, ... -> thread -> process      each lane keeps to one of them,
                        lanes 1, 3, ... -> thread -> process      which reads it in order
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

from parallel3d.data.reader import LaneCursor, Reader, ReadResult
from parallel3d.data.reader_process import ReaderProcess
from parallel3d.parallel.abort import POLL_S, AbortToken

ReadFunction = Callable[[int, LaneCursor, int], ReadResult]


@dataclass(kw_only=True)
class _LanePredictions:
    """One lane's predicted reads, in order: the first begins at `cursor`, each other one where the last one ended."""

    cursor: LaneCursor
    num_tokens: int
    ahead: deque[Future[ReadResult]] = field(default_factory=deque)


class Prefetcher(Reader):
    """Reads lanes ahead for one calling thread. An aborted token ends every wait with GenerationEnded."""

    def __init__(self, reader: Reader, depth: int, token: AbortToken, reader_processes: Sequence[ReaderProcess] = ()):
        """`reader_processes` read ahead instead of `reader`, which then makes only reads that weren't started."""
        self.data_wait_s = 0.0
        """Seconds that the caller has spent in `read`."""
        self.num_ready = 0
        """Reads that were finished when requested."""
        self.num_waited = 0
        """Reads that were in progress when requested."""
        self.num_direct = 0
        """Reads that were not started when requested: not predicted, or too late."""
        self._reader = reader
        self._depth = depth
        self._token = token
        self._predictions: dict[int, _LanePredictions] = {}
        self._reader_processes = tuple(reader_processes)
        self._workers = [_PrefetchWorker(reader_process.read) for reader_process in self._reader_processes] or [
            _PrefetchWorker(reader.read)
        ]
        self._worker_of_lane: dict[int, _PrefetchWorker] = {}

    def start(self, lane: int) -> LaneCursor:
        return self._reader.start(lane)

    def cursor_at(self, cursor: LaneCursor, tokens_read: int) -> LaneCursor:
        return self._reader.cursor_at(cursor, tokens_read)

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> ReadResult:
        """Returns `reader.read(lane, cursor, num_tokens)`; raises what was raised while making it."""
        started = time.perf_counter()
        try:
            self._token.check()
            predictions = self._take_predictions(lane, cursor, num_tokens)
            result = self._take_result(lane, predictions)
            predictions.cursor = result[1]
            self._predict(lane, predictions)
            self._predictions[lane] = predictions  # after an error the lane has none, and starts afresh
            return result
        finally:
            self.data_wait_s += time.perf_counter() - started

    def describe(self) -> str:
        """Returns a line of statistics of the reads."""
        counts = f"{self.num_ready:,} ready, {self.num_waited:,} waited for, {self.num_direct:,} read directly"
        return f"reads of text: {counts}; {self.data_wait_s:.3f} s in total"

    def close(self) -> None:
        """Ends threads and reader processes after their current reads."""
        for ahead in self._workers:
            ahead.thread.shutdown(wait=True, cancel_futures=True)
        for reader_process in self._reader_processes:
            reader_process.close()

    def _take_predictions(self, lane: int, cursor: LaneCursor, num_tokens: int) -> _LanePredictions:
        """Removes and returns the lane's predictions if they include this read, otherwise new ones."""
        predictions = self._predictions.pop(lane, None)
        if predictions is not None:
            if (predictions.cursor, predictions.num_tokens) == (cursor, num_tokens):
                return predictions
            _cancel(predictions)
        return _LanePredictions(cursor=cursor, num_tokens=num_tokens)

    def _take_result(self, lane: int, predictions: _LanePredictions) -> ReadResult:
        if not predictions.ahead or predictions.ahead[0].cancel():
            _cancel(predictions)  # the later ones would build on the one that was cancelled
            self.num_direct += 1
            return self._reader.read(lane, predictions.cursor, predictions.num_tokens)
        first = predictions.ahead.popleft()
        if first.done():
            self.num_ready += 1
            return first.result()
        self.num_waited += 1
        while not first.done():
            self._token.check()
            wait([first], timeout=POLL_S)
        return first.result()

    def _predict(self, lane: int, predictions: _LanePredictions) -> None:
        turn = len(self._worker_of_lane) % len(self._workers)  # a rank's lanes may all be even: deal them as they come
        ahead = self._worker_of_lane.setdefault(lane, self._workers[turn])
        while len(predictions.ahead) < self._depth:
            previous = predictions.ahead[-1] if predictions.ahead else None
            read = partial(self._read_after, previous, ahead.read, lane, predictions.cursor, predictions.num_tokens)
            predictions.ahead.append(ahead.thread.submit(read))

    def _read_after(
        self, previous: Future[ReadResult] | None, read: ReadFunction, lane: int, cursor: LaneCursor, num_tokens: int
    ) -> ReadResult:
        """Runs in the lane's one thread, which takes reads in order: `before` is done."""
        self._token.check()
        return read(lane, previous.result()[1] if previous else cursor, num_tokens)


class _PrefetchWorker:
    """A thread that reads ahead, and what it reads with."""

    def __init__(self, read: ReadFunction):
        self.read = read
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")


def _cancel(predictions: _LanePredictions) -> None:
    for future in predictions.ahead:
        future.cancel()
    predictions.ahead.clear()
