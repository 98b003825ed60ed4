"""Prefetching changes when reads are made, never what they are."""

import threading
import time

import numpy as np
import pytest

from parallel3d.data.lanes import Cursor
from parallel3d.data.prefetch import Prefetcher
from parallel3d.data.reader import Reader
from parallel3d.errors import DataError, GenerationEnded
from parallel3d.parallel.abort import AbortToken


class Counted(Reader):
    """Lanes that count: the tokens of a read are numbers from (lane, offset); `gate` holds the thread back."""

    def __init__(self, delay_s=0.0):
        self.delay_s = delay_s
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.fails_at = None
        self.threads = []

    def read(self, lane, cursor, num_tokens):
        self.threads.append(threading.current_thread().name)
        self.begun.release()
        assert self.gate.wait(10)
        time.sleep(self.delay_s)
        if self.fails_at == (lane, cursor):
            raise DataError(f"bad document in lane {lane}")
        after = Cursor(0, 0, cursor.offset + num_tokens)
        return 1000 * lane + np.arange(cursor.offset, after.offset + 1, dtype=np.int32), after


@pytest.fixture
def make():
    made = []

    def build(lanes, depth=2, token=None):
        made.append(Prefetcher(lanes, depth, token or AbortToken()))
        return made[-1]

    yield build
    for prefetcher in made:
        prefetcher.close()


def at(offset):
    return Cursor(0, 0, offset)


def settle(prefetcher):
    """Waits until the thread has nothing left to do."""
    prefetcher._workers[0].thread.submit(lambda: None).result(timeout=300)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("delay_s", [0.0, 0.002])
def test_results_are_those_of_lanes_read(make, depth, delay_s):
    """Sequential reads of three lanes, then changes of length, jumps back, a new lane, and on again."""
    prefetcher = make(Counted(delay_s), depth)
    plan = [(lane, 8 * step, 8) for step in range(5) for lane in (0, 2, 5)]
    plan += [(0, 40, 4), (0, 44, 4), (2, 16, 8), (2, 24, 8), (7, 0, 8), (0, 48, 4), (2, 32, 8), (5, 40, 8)]
    for lane, offset, num_tokens in plan:
        tokens, after = prefetcher.read(lane, at(offset), num_tokens)
        expected, expected_after = Counted().read(lane, at(offset), num_tokens)
        assert np.array_equal(tokens, expected) and after == expected_after
    assert prefetcher.num_ready + prefetcher.num_waited + prefetcher.num_direct == len(plan)
    assert (prefetcher.num_ready + prefetcher.num_waited == 0) == (depth == 0)


def test_a_predicted_step_does_not_wait(make):
    prefetcher = make(Counted())
    for step in range(4):
        for lane in range(3):
            prefetcher.read(lane, at(8 * step), 8)
        settle(prefetcher)  # the device computes
    assert (prefetcher.num_ready, prefetcher.num_waited, prefetcher.num_direct) == (9, 0, 3)


def test_it_runs_depth_steps_ahead_and_no_more(make):
    lanes = Counted()
    prefetcher = make(lanes, depth=3)
    prefetcher.read(0, at(0), 8)
    settle(prefetcher)
    assert len(lanes.threads) == 1 + 3
    prefetcher.read(0, at(8), 8)
    settle(prefetcher)
    assert len(lanes.threads) == 1 + 3 + 1
    assert sum(name.startswith("prefetch") for name in lanes.threads) == 4


def test_a_read_that_is_being_made_is_waited_for(make):
    lanes = Counted()
    prefetcher = make(lanes)
    prefetcher.read(0, at(0), 8)
    settle(prefetcher)
    lanes.gate.clear()
    prefetcher.read(0, at(8), 8)
    prefetcher.read(0, at(16), 8)
    while len(lanes.threads) < 4:
        time.sleep(0.001)
    threading.Timer(0.05, lanes.gate.set).start()
    tokens, _ = prefetcher.read(0, at(24), 8)
    assert tokens[0] == 24
    assert (prefetcher.num_ready, prefetcher.num_waited, prefetcher.num_direct) == (2, 1, 1)
    assert prefetcher.data_wait_s > 0.03


def test_a_read_that_has_not_begun_is_computed_by_the_caller(make):
    lanes = Counted()
    prefetcher = make(lanes)
    prefetcher.read(0, at(0), 8)
    settle(prefetcher)
    busy = threading.Event()
    prefetcher._workers[0].thread.submit(busy.wait, 10)  # something else holds the thread
    for step in range(1, 5):
        tokens, _ = prefetcher.read(0, at(8 * step), 8)
        assert tokens[0] == 8 * step
    assert (prefetcher.num_ready, prefetcher.num_direct) == (2, 3)
    busy.set()
    settle(prefetcher)
    prefetcher.read(0, at(40), 8)  # it runs ahead again
    assert (prefetcher.num_ready, prefetcher.num_direct) == (3, 3)


def test_an_error_in_the_thread_reaches_the_caller_and_a_retry_starts_afresh(make):
    lanes = Counted()
    prefetcher = make(lanes)
    lanes.fails_at = (0, at(8))
    prefetcher.read(0, at(0), 8)
    settle(prefetcher)
    with pytest.raises(DataError, match="bad document in lane 0"):
        prefetcher.read(0, at(8), 8)
    lanes.fails_at = None
    assert prefetcher.read(0, at(8), 8)[1] == at(16)
    assert prefetcher.read(0, at(16), 8)[1] == at(24)


def test_an_abort_ends_the_wait(make):
    lanes, token = Counted(), AbortToken()
    prefetcher = make(lanes, token=token)
    prefetcher.read(0, at(0), 8)
    settle(prefetcher)
    lanes.gate.clear()
    prefetcher.read(0, at(8), 8)
    prefetcher.read(0, at(16), 8)
    while len(lanes.threads) < 4:
        time.sleep(0.001)
    threading.Timer(0.05, token.abort, ["replica (0, 1) died"]).start()
    with pytest.raises(GenerationEnded, match="replica"):
        prefetcher.read(0, at(24), 8)
    lanes.gate.set()
    with pytest.raises(GenerationEnded):
        prefetcher.read(1, at(0), 8)
