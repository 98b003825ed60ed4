"""Entries arrive at a rank that lacks them as they were sent."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from parallel3d.trainer.entry import Entry, EvaluationEntry
from parallel3d.trainer.entry_codec import decode_entries, encode_entries

floats = st.floats(allow_nan=False)
counts = st.integers(0, 2**53)
widths = st.integers(1, 5)
cursors = widths.flatmap(lambda width: st.lists(st.tuples(*[counts] * width), max_size=6).map(tuple))
iterations = st.builds(
    Entry,
    iteration=counts,
    squared_norm=floats,
    finite=st.booleans(),
    num_target_tokens=counts,
    loss_sum=floats,
    stop=st.booleans(),
    leave=st.booleans(),
    cursors=cursors,
    differing_stages=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    num_saved=st.integers(0, 9),
    param_norm=st.none() | floats,
)
evaluations = st.builds(EvaluationEntry, iteration=counts, loss=st.none() | floats)


@given(entries=st.lists(iterations | evaluations, max_size=3).map(tuple))
def test_entries_arrive_as_they_were_sent(entries: tuple[Entry | EvaluationEntry, ...]):
    encoded = encode_entries(entries)
    assert decode_entries(encoded) == entries and encode_entries(entries) == encoded


def test_a_diverged_entry_and_none():
    entry = Entry(
        iteration=3,
        squared_norm=math.inf,
        finite=False,
        num_target_tokens=5,
        loss_sum=math.nan,
        stop=False,
        leave=False,
        cursors=((1, 2, 3),),
    )
    (arrived,) = decode_entries(encode_entries((entry,)))
    assert math.isnan(arrived.loss_sum) and arrived.squared_norm == math.inf and arrived.cursors == entry.cursors
    assert decode_entries(b"") == ()


def test_cursors_are_compact():
    """Lanes that have read about equally much: 3 bytes a lane instead of 20."""
    cursors = tuple((0, 1_000_000 + 37 * lane % 911, lane * 4096 % 50_000) for lane in range(4096))
    entry = Entry(
        iteration=3,
        squared_norm=1.0,
        finite=True,
        num_target_tokens=5,
        loss_sum=1.0,
        stop=False,
        leave=False,
        cursors=cursors,
    )
    assert len(encode_entries((entry,))) < 8 * 4096
