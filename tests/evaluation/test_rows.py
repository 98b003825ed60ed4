"""Rows: what is scored, what is only read, and how rows make up batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.evaluation.rank_scorer import score_targets
from parallel3d.evaluation.results import GroupResult
from parallel3d.evaluation.rows import (
    RowScore,
    ScoredRow,
    continuation_row,
    fill_up,
    make_batches,
    packed_rows,
    sliding_rows,
)


@given(num_tokens=st.integers(1, 40), window=st.integers(1, 12), data=st.data())
def test_each_token_is_scored_once_with_as_much_before_it_as_the_window_holds(num_tokens, window, data):
    stride = data.draw(st.integers(1, window))
    text = np.arange(10, 10 + num_tokens, dtype=np.int32)
    scored = []
    for row in sliding_rows(text, first=5, window=window, stride=stride, group=0):
        ids = np.where(row.tokens < 0, ~row.tokens, row.tokens)
        targets = np.flatnonzero(row.tokens[1:] >= 0) + 1
        assert row.length <= window and row.num_targets == len(targets) <= (stride if scored else window)
        assert np.array_equal(np.diff(ids[ids >= 10]), np.ones(len(ids[ids >= 10]) - 1))
        assert row.length == min(window, ids[-1] - 9)  # as full as the text before it allows
        scored += ids[targets].tolist()
    assert scored == text.tolist()


def test_packed_rows_cut_documents_exactly():
    documents = [np.arange(first, first + 5) for first in (10, 20, 30)]
    rows = [row.tokens.tolist() for row in packed_rows(documents, length=6, group=0)]
    assert rows == [[10, 11, 12, 13, 14, 20, 21], [21, 22, 23, 24, 30, 31, 32], [32, 33, 34]]


def test_batches_hold_all_rows_and_few_logits():
    rows = [ScoredRow(tokens=np.zeros(length + 1, np.int32)) for length in (3, 900, 4, 1, 800, 3)]
    assert make_batches(rows, batch_size=3, vocab_size=1000) == [[1, 4, 2], [0, 5, 3]]
    # two rows of 800 tokens have 80 million logits
    assert make_batches(rows, batch_size=3, vocab_size=50_000) == [[1], [4], [2, 0, 5], [3]]


def test_scores_are_those_of_the_targets_alone():
    """Against torch's cross-entropy, as exactly as fp32 has logits below 10; neither what fills a row up
    nor what is only read has a part."""
    rows = [continuation_row([1, 2], [3, 4]), continuation_row([4], [0])]
    stored = fill_up(rows)
    assert stored.tolist() == [[~1, ~2, 3, 4], [~4, 0, -1, -1]]
    targets = torch.tensor([[-1, 3, 4], [0, -1, -1]])
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    logits[0, 1, 3] = logits[0, 2, 4] = 9.0
    logits[1, 0, 1] = 9.0
    first, second = score_targets(logits.view(6, 5), targets)
    for score, each, marked in zip((first, second), logits, targets):
        wanted = torch.nn.functional.cross_entropy(each.double(), marked, ignore_index=-1, reduction="sum")
        assert score.log_prob == pytest.approx(-float(wanted), abs=1e-6)
    assert (first.num_targets, first.is_greedy) == (2, True)
    assert (second.num_targets, second.is_greedy) == (1, False)


def test_the_standard_error_is_the_spread_of_other_texts():
    """Losses of 2,000 texts drawn in one way vary by what each of them says of itself: 10 %. Tokens of a row vary
    together, so that the spread of single tokens would say a third of it."""
    random = np.random.default_rng(5)
    groups = []
    for _ in range(2000):
        sizes = random.integers(5, 40, size=60)
        means = 3.0 + 0.5 * random.standard_normal(60)
        sums = [random.exponential(mean, size).sum() for mean, size in zip(means, sizes)]
        scores = [RowScore(log_prob=-s, num_targets=int(n), is_greedy=False) for s, n in zip(sums, sizes)]
        groups.append(GroupResult.of("text", scores))
    spread = np.std([group.loss for group in groups])
    assert np.mean([group.loss_stderr for group in groups]) == pytest.approx(spread, rel=0.1)
    halves = [GroupResult.sum_of("both", groups[:2]), GroupResult.sum_of("both", [groups[0]])]
    assert halves[0].loss_stderr < groups[0].loss_stderr and halves[1].loss_stderr == groups[0].loss_stderr
    one = RowScore(log_prob=-1.0, num_targets=2, is_greedy=True)
    assert GroupResult.of("one", [one]).loss_stderr is None
    right = [RowScore(log_prob=-1.0, num_targets=2, is_greedy=n < 25) for n in range(101)]
    assert GroupResult.of("words", right).accuracy_stderr == pytest.approx((25 / 101 * 76 / 101 / 100) ** 0.5)
