"""The replica check's arithmetic: equal copies cancel, others do not; names and suspects."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.debug.replica_check import (
    NUM_CHECKSUMS,
    PRIME,
    ReplicaCopy,
    ReplicaDifference,
    checksums_of,
    describe_difference,
    find_differences,
    has_difference,
)

RINGS = [(0, 1), (2, 3), (0, 2), (1, 3), (4,), (0, 1, 2, 3, 4)]  # crossing each other, some under one name
digests = st.integers(0, 2**64 - 1)


def totals(values, iteration=7):
    """The sums of all ranks' words; `values[ring][holder]` are digests."""
    words = []
    for rank in range(5):
        mine = [
            ReplicaCopy(name="w", holders=ring, digest=values[ring][ring.index(rank)]) for ring in RINGS if rank in ring
        ]
        words.append(checksums_of(mine, rank=rank, iteration=iteration))
    return [float(sum(column)) for column in zip(*words)]


@given(st.lists(digests, min_size=len(RINGS), max_size=len(RINGS)), st.integers(1, 1000))
def test_equal_copies_cancel(values, iteration):
    assert not has_difference(totals({ring: [v] * len(ring) for ring, v in zip(RINGS, values)}, iteration))


@given(digests, st.data())
def test_one_copy_that_differs_is_seen(value, data):
    same = {ring: [value] * len(ring) for ring in RINGS}
    ring = data.draw(st.sampled_from([ring for ring in RINGS if len(ring) > 1]))
    position = data.draw(st.integers(0, len(ring) - 1))
    same[ring][position] = data.draw(digests.filter(lambda other: other != value))
    assert has_difference(totals(same))


def test_one_rank_of_two_rings_is_seen():
    """Its replicas and its tensor-parallel peers hold the same parameter under one name: tags must not cancel."""
    for odd, bit in product(range(4), (0, 31, 32, 63)):
        words = []
        for rank in range(4):
            value = 5 ^ (1 << bit if rank == odd else 0)
            mine = [ReplicaCopy(name="w", holders=ring, digest=value) for ring in RINGS[:4] if rank in ring]
            words.append(checksums_of(mine, rank=rank, iteration=1))
        assert has_difference([sum(column) for column in zip(*words)]), (odd, bit)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3).filter(lambda draws: len(set(draws)) > 1))
def test_a_word_is_missed_once_in_its_prime(words):
    """Over the iterations the sum of a pattern that differs takes different values: none is stuck at zero."""
    found = set()
    for iteration in range(8):
        ranks = [
            checksums_of([ReplicaCopy(name="w", holders=(0, 1, 2), digest=word)], rank=rank, iteration=iteration)
            for rank, word in enumerate(words)
        ]
        found.add(sum(word[0] for word in ranks) % PRIME)
    assert len(found) == 8


def test_words_add_up_exactly():
    """The largest number of ranks of which float64 adds up the words exactly."""
    assert 2**21 * (PRIME - 1) < 2**53
    words = checksums_of([ReplicaCopy(name="w", holders=(0, 1), digest=2**64 - 1)], rank=0, iteration=1)
    assert len(words) == NUM_CHECKSUMS and all(0 <= word < PRIME for word in words)


PLACES = {rank: f"pp0 dp{rank} tp0" for rank in range(4)}


@pytest.mark.parametrize(
    "values, suspects, text",
    [
        ([1, 1, 2, 1], (2,), "weights of w: rank 2 (pp0 dp2 tp0) against 3 others"),
        ([1, 2, 3, 1], (), "weights of w: rank 0 (pp0 dp0 tp0), rank 3 (pp0 dp3 tp0) / rank 1 (pp0 dp1 tp0) / "),
        ([1, 2], (), "weights of w: rank 0 (pp0 dp0 tp0) / rank 1 (pp0 dp1 tp0), no majority"),
        ([3, 2, 3, 3], (1,), "weights of w: rank 1 (pp0 dp1 tp0) against 3 others"),
    ],
)
def test_who_differs(values, suspects, text):
    tables = {rank: {"weights of v": 9, "weights of w": value} for rank, value in enumerate(values)}
    (found,) = find_differences(tables)
    assert found.name == "weights of w" and found.suspects == suspects
    assert describe_difference(found, PLACES).startswith(text)


def test_nothing_differs():
    assert find_differences({0: {"a": 1}, 1: {"a": 1, "b": 2}}) == []
    assert ReplicaDifference(name="x", groups=((0, 1, 2), (3,))).suspects == (3,)
