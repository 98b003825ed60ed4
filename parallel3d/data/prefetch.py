"""Tokenisation that runs ahead of training: the same results as `Lanes.read`, ready before they are asked for.

A lane is read in order, so after each read the next ones are known. Background threads make them, `depth` steps ahead
for every lane that has been asked for; a read that was predicted takes the result, or waits when it is being made, and
any other read is computed on the spot. Timing decides who computes, never what.

    one thread                     lanes -> thread
    helpers (data.num_processes)   lanes 0, 2, ... -> thread -> process      each lane keeps to one of them,
                                   lanes 1, 3, ... -> thread -> process      which reads it in order
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

from parallel3d.comm.abort import POLL_S, AbortToken
from parallel3d.data.reader import LaneCursor, Read, Reader
from parallel3d.data.reader_process import ReaderProcess

MakeRead = Callable[[int, LaneCursor, int], Read]


@dataclass(kw_only=True)
class _Track:
    """One lane's predicted reads, in order: the first begins at `cursor`, each other one where the last one ended."""

    cursor: LaneCursor
    num_tokens: int
    ahead: deque[Future[Read]] = field(default_factory=deque)


class Prefetcher(Reader):
    """Reads lanes ahead, for one calling thread. An aborted token ends every wait with EpochEnded."""

    def __init__(self, reader: Reader, depth: int, token: AbortToken, helpers: Sequence[ReaderProcess] = ()):
        """`helpers` read ahead in place of `reader`, which then makes only what nobody has begun."""
        self.data_wait_s = 0.0
        """Seconds that the caller has spent in `read`."""
        self.num_ready = 0
        """Reads that were finished when asked for."""
        self.num_waited = 0
        """Reads that were being made when asked for."""
        self.num_direct = 0
        """Reads that nobody had begun: not predicted, or too late."""
        self._reader = reader
        self._depth = depth
        self._token = token
        self._tracks: dict[int, _Track] = {}
        self._helpers = tuple(helpers)
        self._ahead = [_Ahead(helper.read) for helper in self._helpers] or [_Ahead(reader.read)]
        self._ahead_of: dict[int, _Ahead] = {}

    def start(self, lane: int) -> LaneCursor:
        return self._reader.start(lane)

    def at(self, cursor: LaneCursor, tokens_read: int) -> LaneCursor:
        return self._reader.at(cursor, tokens_read)

    def read(self, lane: int, cursor: LaneCursor, num_tokens: int) -> Read:
        """Returns `reader.read(lane, cursor, num_tokens)`; raises what was raised while making it."""
        started = time.perf_counter()
        try:
            self._token.check()
            track = self._track(lane, cursor, num_tokens)
            result = self._take(lane, track)
            track.cursor = result[1]
            self._predict(lane, track)
            self._tracks[lane] = track  # after an error the lane has none, and starts afresh
            return result
        finally:
            self.data_wait_s += time.perf_counter() - started

    def describe(self) -> str:
        """A line on how its reads have been."""
        counts = f"{self.num_ready:,} ready, {self.num_waited:,} waited for, {self.num_direct:,} made on the spot"
        return f"reads of text: {counts}; {self.data_wait_s:.3f} s in all"

    def close(self) -> None:
        """Ends threads and helpers, once they have finished the reads that they are at."""
        for ahead in self._ahead:
            ahead.thread.shutdown(wait=True, cancel_futures=True)
        for helper in self._helpers:
            helper.close()

    def _track(self, lane: int, cursor: LaneCursor, num_tokens: int) -> _Track:
        """Takes out the lane's track if it predicted this read, else a new one."""
        track = self._tracks.pop(lane, None)
        if track is not None:
            if (track.cursor, track.num_tokens) == (cursor, num_tokens):
                return track
            _cancel(track)
        return _Track(cursor=cursor, num_tokens=num_tokens)

    def _take(self, lane: int, track: _Track) -> Read:
        if not track.ahead or track.ahead[0].cancel():
            _cancel(track)  # the later ones would build on the one that was cancelled
            self.num_direct += 1
            return self._reader.read(lane, track.cursor, track.num_tokens)
        first = track.ahead.popleft()
        if first.done():
            self.num_ready += 1
            return first.result()
        self.num_waited += 1
        while not first.done():
            self._token.check()
            wait([first], timeout=POLL_S)
        return first.result()

    def _predict(self, lane: int, track: _Track) -> None:
        turn = len(self._ahead_of) % len(self._ahead)  # a rank's lanes may all be even: deal them as they come
        ahead = self._ahead_of.setdefault(lane, self._ahead[turn])
        while len(track.ahead) < self._depth:
            before = track.ahead[-1] if track.ahead else None
            read = partial(self._read_after, before, ahead.read, lane, track.cursor, track.num_tokens)
            track.ahead.append(ahead.thread.submit(read))

    def _read_after(
        self, before: Future[Read] | None, read: MakeRead, lane: int, cursor: LaneCursor, num_tokens: int
    ) -> Read:
        """Runs in the lane's one thread, which takes reads in order: `before` is done."""
        self._token.check()
        return read(lane, before.result()[1] if before else cursor, num_tokens)


class _Ahead:
    """A thread that reads ahead, and what it reads with."""

    def __init__(self, read: MakeRead):
        self.read = read
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")


def _cancel(track: _Track) -> None:
    for future in track.ahead:
        future.cancel()
    track.ahead.clear()
