"""Attention within a sliding window against a plain banded mask, whole and over documents."""

import pytest
import torch

from parallel3d.layers.attention import attend, attend_per_document

BATCH, SEQ, HEADS, KV_HEADS, SIZE = 2, 13, 4, 2, 8


def plain(q, k, v, window):
    """Softmax over scores with a dense mask: query i sees keys i - window + 1 to i."""
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=2) for each in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / SIZE**0.5
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def draw():
    numbers = torch.Generator().manual_seed(7)
    shapes = [(BATCH, SEQ, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=numbers, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [1, 2, 5, 6, 12, 13, 40])
def test_values_and_gradients_are_those_of_a_banded_mask(window):
    """fp64 rounds at 1e-16; sums of at most 13 terms are in another order."""
    ours, theirs = draw(), draw()
    mixed, expected = attend(*ours, window), plain(*theirs, window)
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-13)
    weights = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    (mixed * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, yours in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, yours.grad, rtol=0, atol=1e-13)


def test_a_window_of_the_sequence_hides_nothing():
    q, k, v = draw()
    assert torch.equal(attend(q, k, v, SEQ), attend(q, k, v))
    assert not torch.allclose(attend(q, k, v, SEQ - 1), attend(q, k, v))


def test_a_window_ends_with_its_document():
    q, k, v = (each.detach() for each in draw())
    documents = (4, 9, 6, 7)
    mixed = attend_per_document(documents, q, k, v, 3)
    ends = [sum(documents[: n + 1]) for n in range(len(documents))]
    for length, end in zip(documents, ends):
        part = [each.flatten(0, 1)[None, end - length : end] for each in (q, k, v)]
        torch.testing.assert_close(mixed[:, end - length : end], plain(*part, 3), rtol=0, atol=1e-13)
