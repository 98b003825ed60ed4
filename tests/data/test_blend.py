"""Blends: shares of the tokens at every length, sources that lose nothing, weights that change at the right token."""

import json
import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.data.blend import BlendedReader, BlendStage, choose_source, low_discrepancy_number, seed_offset
from parallel3d.data.prefetch import Prefetcher
from parallel3d.parallel.abort import AbortToken
from tests.support.letter_corpus import Texts, corpora, flat, lanes_of, seeds

HLAT_LAST_STAGE = (90 / 253.7, 104.7 / 253.7, 59 / 253.7)
weights = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any).map(tuple)


def stage(*shares, from_token=0):
    return BlendStage(from_token=from_token, weights=shares)


def read_on(blend, lane, cursor, lengths):
    """(source, tokens) of consecutive reads, and the cursor behind them."""
    reads = []
    for num_tokens in lengths:
        source = blend.source_of(lane, cursor)
        tokens, cursor = blend.read(lane, cursor, num_tokens)
        reads.append((source, tokens))
    return reads, cursor


def sources_of(shares, *, seed=1234, num_lanes=16, steps=200):
    """(steps, lanes): the source of each sequence."""
    bounds, offset = stage(*shares).bounds, seed_offset(seed)
    return np.array(
        [
            [choose_source(bounds, low_discrepancy_number(offset, lane, step)) for lane in range(num_lanes)]
            for step in range(steps)
        ]
    )


# --- the choice -------------------------------------------------------------------------------------------------------


@given(weights, seeds, st.integers(1, 64), st.integers(1, 40))
def test_every_step_and_every_lane_has_its_shares(shares, seed, num_lanes, steps):
    """Within what evenly spread numbers allow: a count is off by the logarithm of how many there are, not its root."""
    chosen = sources_of(shares, seed=seed, num_lanes=num_lanes, steps=steps)
    for source, weight in enumerate(shares):
        share = weight / sum(shares)
        by_step, by_lane = (chosen == source).sum(axis=1), (chosen == source).sum(axis=0)
        assert np.abs(by_step - share * num_lanes).max() <= 2 + math.log2(num_lanes)
        assert np.abs(by_lane - share * steps).max() <= 2 + math.log2(steps)
        assert weight or not (by_step.any() or by_lane.any())


def test_steps_of_a_power_of_two_are_as_even_as_can_be():
    chosen = sources_of(HLAT_LAST_STAGE, num_lanes=16)
    for source, share in enumerate(HLAT_LAST_STAGE):
        assert set((chosen == source).sum(axis=1)) <= {math.floor(16 * share), math.ceil(16 * share)}


def test_any_first_slots_of_a_step_have_the_shares_too():
    """The reads of a smaller batch: its slots must not all lie in one source's part."""
    chosen = sources_of((0.5, 0.5), num_lanes=64)
    for size in (2, 8, 24):
        assert np.abs((chosen[:, :size] == 0).sum(axis=1) - size / 2).max() <= 2


def test_shares_lie_far_within_three_sigma_of_draws():
    """The last stage of HLAT-70B, 10,000 sequences: 35.47 %, 41.27 % and 23.26 % of the tokens."""
    chosen = sources_of(HLAT_LAST_STAGE, num_lanes=100, steps=100)
    for source, percent in enumerate((35.47, 41.27, 23.26)):
        sigma = math.sqrt(percent * (100 - percent) / chosen.size)
        assert abs(100 * (chosen == source).mean() - percent) < 0.1 * 3 * sigma + 0.005


def test_the_choice_is_pinned():
    """The order of the data is part of every run: it must not change with a version."""
    assert sources_of((0.7, 0.3), num_lanes=6, steps=4).tolist() == PINNED
    assert seed_offset(1234) != seed_offset(1235)


PINNED = [[0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 1], [1, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0]]


@given(weights)
def test_bounds_are_the_cumulative_weights(shares):
    bounds, total = stage(*shares).bounds, sum(shares)
    assert bounds[-1] == 2**64 and all(first <= second for first, second in pairwise(bounds))
    for source, bound in enumerate(bounds):
        assert abs(Fraction(bound, 2**64) - Fraction(sum(shares[: source + 1]), total)) <= Fraction(1, 2**52)


def test_weights_change_exactly_at_their_token():
    """HLAT-70B: 1,024 x 4,096 tokens a step; the last 400 of 1,800 billion have other weights."""
    first, batch, length = 1_400_000_000_000, 1024, 4096
    blend = BlendedReader([lanes_of("ab", 0, 1)] * 3, [stage(1, 0, 0), stage(*HLAT_LAST_STAGE, from_token=first)], 0)
    cursor = blend.start(0)
    assert blend.cursor_at(cursor, first - 1)[0] == 0 and blend.cursor_at(cursor, first)[0] == 1
    step, slot = divmod(-(-first // length), batch)
    stages = [blend.cursor_at(cursor, step * batch * length + number * length)[0] for number in range(batch)]
    assert stages == [0] * slot + [1] * (batch - slot) and 0 < slot < batch


# --- what is read -----------------------------------------------------------------------------------------------------


@st.composite
def blends(draw):
    """(blend, texts of each source): up to 4 lanes, of which each source feeds all."""
    num_lanes = draw(st.integers(1, 4))
    texts = draw(st.lists(corpora.filter(lambda each: len(each) >= num_lanes), min_size=1, max_size=3))
    shares = draw(st.lists(st.integers(1, 5), min_size=len(texts), max_size=len(texts)))
    other = draw(st.permutations(shares))
    stages = [stage(*shares), stage(*other, from_token=draw(st.integers(1, 100)))]
    seed = draw(seeds)
    return BlendedReader([lanes_of(each, seed, num_lanes) for each in texts], stages, seed), texts, num_lanes, seed


@given(blends(), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_what_a_lane_reads_of_a_source_is_a_prefix_of_the_sources_lane(made, lengths):
    """Nothing lost, nothing repeated, whatever was read of other sources in between."""
    blend, texts, num_lanes, seed = made
    for lane in range(num_lanes):
        reads, _ = read_on(blend, lane, blend.start(lane), lengths)
        for source, documents in enumerate(texts):
            mine = [tokens for number, tokens in reads if number == source]
            if mine:
                read = np.concatenate([tokens[:-1] for tokens in mine] + [mine[-1][-1:]])
                lanes = lanes_of(documents, seed, num_lanes)
                epochs = [flat(documents, lanes.document_sequence(lane, epoch)) for epoch in range(len(read))]
                assert np.array_equal(read, np.concatenate(epochs)[: len(read)])


@given(blends(), st.integers(1, 8), st.data())
def test_who_reads_and_from_when_on_changes_nothing(made, length, data):
    """Steps of all lanes, whose readers change at random: fresh ones after a resume, some that read ahead, any number
    of them, each lane in anybody's hands. Cursors travel as JSON. The streams are those of one reader."""
    blend, _, num_lanes, _ = made
    hands = [blend, *(Prefetcher(blend, 2, AbortToken()) for _ in range(2))]
    steps = data.draw(st.integers(1, 6))
    tokens_read, cursors = 0, [blend.start(lane) for lane in range(num_lanes)]
    seen, alone = [], [[] for _ in range(num_lanes)]
    for _ in range(steps):
        for lane in range(num_lanes):
            hand = data.draw(st.sampled_from(hands))
            cursor = hand.cursor_at(tuple(json.loads(json.dumps(cursors[lane]))), tokens_read + lane * length)
            tokens, cursors[lane] = hand.read(lane, cursor, length)
            seen.append(tokens.tobytes())
        tokens_read += num_lanes * length
    for lane in range(num_lanes):
        cursor = blend.start(lane)
        for step in range(steps):
            tokens, cursor = blend.read(lane, blend.cursor_at(cursor, (step * num_lanes + lane) * length), length)
            alone[lane].append(tokens.tobytes())
    for hand in hands[1:]:
        hand.close()
    assert seen == [alone[lane][step] for step in range(steps) for lane in range(num_lanes)]


@given(corpora, seeds, st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_one_source_is_its_lanes(texts, seed, lengths):
    lanes = lanes_of(texts, seed, 1)
    blend = BlendedReader([lanes], [stage(1.0)], seed)
    reads, (_, num_sequences, *source_cursors) = read_on(blend, 0, blend.start(0), lengths)
    whole, end = lanes.read(0, lanes.start(0), sum(lengths))
    assert np.array_equal(np.concatenate([tokens[:-1] for _, tokens in reads]), whole[:-1])
    assert tuple(source_cursors) == end and num_sequences == len(lengths)


def test_a_small_source_passes_data_epochs_while_a_large_one_is_at_its_first():
    small, large = Texts(["ab"] * 4), Texts(["abcdefgh"] * 400)
    blend = BlendedReader([lanes_of(small, 1, 2), lanes_of(large, 1, 2)], [stage(0.5, 0.5)], 1)
    _, (_, _, *source_cursors) = read_on(blend, 0, blend.start(0), [8] * 40)
    epochs = source_cursors[::3]
    assert epochs[0] > 10 and epochs[1] == 0


def test_a_wrong_first_stage_is_our_own_mistake():
    with pytest.raises(AssertionError, match="run's start"):
        BlendedReader([lanes_of("ab", 0, 1)], [stage(1.0, from_token=5)], 0)
