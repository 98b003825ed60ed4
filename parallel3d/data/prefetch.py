"""Tokenisation that runs ahead of training: the same results as `Lanes.read`, ready before they are asked for.

A lane is read in order, so after each read the next ones are known. One background thread makes them, `depth` steps
ahead for every lane it has been asked for; a read that was predicted takes the result, or waits when it is being made,
and any other read is computed on the spot. Timing decides who computes, never what.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from parallel3d.comm.abort import POLL_S, AbortToken
from parallel3d.data.lanes import Cursor, Lanes

Read = tuple[np.ndarray, Cursor]


@dataclass(kw_only=True)
class _Track:
    """One lane's predicted reads, in order: the first begins at `cursor`, each other one where the last one ended."""

    cursor: Cursor
    num_tokens: int
    ahead: deque[Future[Read]] = field(default_factory=deque)


class Prefetcher:
    """Reads lanes ahead, for one calling thread. An aborted token ends every wait with EpochEnded."""

    def __init__(self, lanes: Lanes, depth: int, token: AbortToken):
        self.data_wait_s = 0.0
        """Seconds that the caller has spent in `read`."""
        self.num_ready = 0
        """Reads that were finished when asked for."""
        self.num_waited = 0
        """Reads that were being made when asked for."""
        self.num_direct = 0
        """Reads that nobody had begun: not predicted, or too late."""
        self._lanes = lanes
        self._depth = depth
        self._token = token
        self._tracks: dict[int, _Track] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")

    def read(self, lane: int, cursor: Cursor, num_tokens: int) -> Read:
        """Returns `lanes.read(lane, cursor, num_tokens)`; raises what the thread raised while making it."""
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

    def close(self) -> None:
        """Ends the thread, once it has finished the read that it is at."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _track(self, lane: int, cursor: Cursor, num_tokens: int) -> _Track:
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
            return self._lanes.read(lane, track.cursor, track.num_tokens)
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
        while len(track.ahead) < self._depth:
            before = track.ahead[-1] if track.ahead else None
            track.ahead.append(
                self._thread.submit(self._read_after, before, lane, track.cursor, track.num_tokens),
            )

    def _read_after(self, before: Future[Read] | None, lane: int, cursor: Cursor, num_tokens: int) -> Read:
        """Runs in the thread, which is alone and takes reads in order: `before` is done."""
        self._token.check()
        return self._lanes.read(lane, before.result()[1] if before else cursor, num_tokens)


def _cancel(track: _Track) -> None:
    for future in track.ahead:
        future.cancel()
    track.ahead.clear()
