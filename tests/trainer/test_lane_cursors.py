"""An entry's cursors from its sum are equal, in every use, to the tuple of the same cursors."""

import operator

import numpy as np

from parallel3d.trainer.entry import Entry
from parallel3d.trainer.entry_codec import decode_entries, encode_entries
from parallel3d.trainer.lane_cursors import LaneCursors

TUPLES = ((0, 5, 2**40), (1, 6, 0), (2, 7, 9))


def test_they_are_what_the_tuple_is():
    cursors = LaneCursors(np.array(TUPLES, dtype=np.int64))
    assert cursors == TUPLES and operator.eq(TUPLES, cursors) and hash(cursors) == hash(TUPLES)
    assert cursors == LaneCursors(np.array(TUPLES)) and cursors != LaneCursors(np.array(TUPLES[:2]))
    assert cursors != TUPLES[::-1] and cursors != 7
    assert (len(cursors), cursors[1], cursors[1:], tuple(cursors)) == (3, TUPLES[1], TUPLES[1:], TUPLES)
    assert all(type(number) is int for cursor in cursors for number in cursor) and repr(cursors) == repr(TUPLES)


def test_they_travel():
    plain = dict(iteration=1, squared_norm=4.0, finite=True, num_target_tokens=10)
    plain |= dict(loss_sum=25.0, stop=False, leave=False)
    sent = Entry(**plain, cursors=LaneCursors(np.array(TUPLES, dtype=np.int64)))
    (arrived,) = decode_entries(encode_entries([sent]))
    assert arrived == sent and encode_entries([sent]) == encode_entries([Entry(**plain, cursors=TUPLES)])
