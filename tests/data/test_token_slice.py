"""Slices of a file of tokens: whole global batches, exact fits, and runs that go on without overlap or gap."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from parallel3d.data.token_slice import ALL, TokenSliceReader, plan_slice
from parallel3d.errors import DataError

BATCH = dict(global_batch_size=4, sequence_length=8)
FULL = 32
"""Tokens of such a batch."""


class Row:
    """Tokens that are their own numbers."""

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens

    def read(self, start, count):
        assert 0 <= start <= start + count <= self.num_tokens
        return np.arange(start, start + count, dtype=np.int32)


def plan(num_tokens, *, start=0, wanted=ALL):
    return plan_slice(num_tokens, start_token=start, min_tokens=wanted, **BATCH)


def steps_of(part, num_steps, num_tokens):
    """(steps, slots, tokens) as a run reads them."""
    reader = TokenSliceReader(Row(num_tokens), part)
    cursors = [reader.start(slot) for slot in range(part.global_batch_size)]
    steps = []
    for _ in range(num_steps):
        reads = [reader.read(slot, cursor, part.sequence_length) for slot, cursor in enumerate(cursors)]
        cursors = [cursor for _, cursor in reads]
        steps.append([tokens for tokens, _ in reads])
    return np.array(steps)


@pytest.mark.parametrize(
    ("wanted", "batches"), [(1, 1), (FULL - 1, 1), (FULL, 1), (FULL + 1, 2), (3 * FULL, 3), (3 * FULL + 1, 4)]
)
def test_tokens_are_rounded_up_to_whole_batches_and_an_exact_multiple_is_none_more(wanted, batches):
    assert plan(1000, wanted=wanted).num_batches == batches


@pytest.mark.parametrize(
    ("num_tokens", "batches"), [(FULL + 1, 1), (2 * FULL, 1), (2 * FULL + 1, 2), (2 * FULL + 2, 2), (1000, 31)]
)
def test_all_is_as_many_batches_as_fit_with_their_last_target(num_tokens, batches):
    assert plan(num_tokens).num_batches == batches
    assert plan(num_tokens + 7, start=7).num_batches == batches


def test_an_exact_fit_is_read_to_its_last_token():
    part = plan(3 * FULL + 1, wanted=3 * FULL)
    assert steps_of(part, 3, 3 * FULL + 1)[-1, -1, -1] == 3 * FULL


@pytest.mark.parametrize("start", [1000, 1001, 10**9])
def test_a_start_behind_the_end_is_refused(start):
    with pytest.raises(DataError, match=f"start_token {start:,}: the file has 1,000 tokens"):
        plan(1000, start=start)


def test_a_slice_that_does_not_fit_says_how_much_would():
    with pytest.raises(
        DataError, match=r"from token 900 on the file has 99 tokens .* room for 3 .* and 4 are asked for"
    ):
        plan(1000, start=900, wanted=100)
    with pytest.raises(DataError, match="room for 0 global batches of 4 x 8 = 32, and 1 are asked for"):
        plan(FULL)


@given(st.integers(1, 2000), st.integers(0, 1999), st.integers(1, 500) | st.just(ALL))
def test_a_slice_fits_and_is_rounded_up_to_a_batch(num_tokens, start, wanted):
    most = (num_tokens - start - 1) // FULL
    needed = most if wanted == ALL else -(-wanted // FULL)
    if not 1 <= needed <= most:
        with pytest.raises(DataError):
            plan(num_tokens, start=start, wanted=wanted)
        return
    part = plan(num_tokens, start=start, wanted=wanted)
    assert part.num_batches == needed and part.stop + 1 <= num_tokens
    assert wanted == ALL or part.num_tokens - FULL < wanted <= part.num_tokens


@given(st.integers(0, 50), st.integers(1, 4), st.integers(1, 4))
def test_inputs_and_targets_are_the_file_in_its_order(start, micro_batch_size, num_batches):
    """The usual loop: xs = tokens[:-1], ys = tokens[1:], cut into micro-batches in turn."""
    assume(BATCH["global_batch_size"] % micro_batch_size == 0)
    num_tokens = start + num_batches * FULL + 1
    read = steps_of(plan(num_tokens, start=start), num_batches, num_tokens)
    row = np.arange(start, num_tokens)
    xs, ys = (part.reshape(-1, micro_batch_size, 8) for part in (row[:-1], row[1:]))
    assert np.array_equal(read[:, :, :-1].reshape(-1, micro_batch_size, 8), xs)
    assert np.array_equal(read[:, :, 1:].reshape(-1, micro_batch_size, 8), ys)


def test_a_run_that_goes_on_begins_where_the_first_has_stopped():
    num_tokens = 500
    first = plan(num_tokens, start=3, wanted=70)
    second = plan(num_tokens, start=first.stop, wanted=100)
    both = [steps_of(part, part.num_batches, num_tokens)[:, :, :-1].ravel() for part in (first, second)]
    assert np.array_equal(np.concatenate(both), np.arange(3, second.stop))


def test_behind_its_end_a_slice_is_read_again():
    part = plan(100, start=5, wanted=64)
    assert np.array_equal(steps_of(part, 4, 100)[2:], steps_of(part, 2, 100))


def test_other_lengths_are_refused():
    with pytest.raises(DataError, match="batch.sequence_length = 8 tokens, not of 4"):
        TokenSliceReader(Row(100), plan(100)).read(0, (0,), 4)


@pytest.mark.parametrize(
    ("global_batch_size", "steps", "num_tokens"),
    [(104, 30_614, 3_260_268_544), (512, 6_219, None), (216, 14_740, None), (224, 14_214, None)],
)
def test_the_steps_of_published_runs(global_batch_size, steps, num_tokens):
    """GPT-2 163M on 20 tokens a parameter, sequences of 1,024, on machines of several sizes."""
    part = plan_slice(
        10**10,
        start_token=0,
        min_tokens=20 * 163_009_536,
        global_batch_size=global_batch_size,
        sequence_length=1024,
    )
    assert part.num_batches == steps and num_tokens in (None, part.num_tokens)
