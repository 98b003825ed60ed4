"""Digests of tensors: every bit counts, and so does its place; how the bytes are stored does not."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.debug.digest import CHUNK_WORDS, digest
from parallel3d.random_keys import key_of, normal

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def numbers(size, dtype=torch.float32):
    return (normal(key_of("test"), torch.arange(size)) * 100).to(dtype)


def flipped(tensor, bit):
    """A copy of the tensor with one bit of its memory the other way."""
    data = tensor.clone().view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8
    return data.view(tensor.dtype)


@given(st.sampled_from(DTYPES), st.integers(1, 40), st.data())
def test_every_bit_counts(dtype, size, data):
    tensor = numbers(size, dtype)
    bit = data.draw(st.integers(0, tensor.nbytes * 8 - 1))
    assert digest([flipped(tensor, bit)]) != digest([tensor])


@given(st.integers(1, 60), st.data())
def test_several_bits_and_places_count(size, data):
    """Sign bits above all: they cancel in a plain sum of products."""
    tensor = numbers(size, torch.float64)
    rows = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4, unique=True))
    other = tensor.clone()
    other[rows] = -other[rows]
    assert digest([other]) != digest([tensor])
    assert size == 1 or digest([tensor.roll(1)]) != digest([tensor])


def test_what_does_not_count():
    tensor = numbers(3 * CHUNK_WORDS + 5)
    assert digest([tensor]) == digest([tensor.view(-1, 1).expand(-1, 2)[:, 1]])  # not contiguous
    longer = numbers(len(tensor) + 1).roll(1)
    longer[1:] = tensor
    assert digest([longer[1:]]) == digest([tensor])  # not aligned
    assert 0 <= digest([tensor]) < 2**64


def test_chunks_and_order_count():
    tensor = numbers(4 * CHUNK_WORDS)  # two chunks
    swapped = torch.cat([tensor[2 * CHUNK_WORDS :], tensor[: 2 * CHUNK_WORDS]])
    assert digest([swapped]) != digest([tensor])
    assert digest([tensor[:4], tensor[4:8]]) != digest([tensor[4:8], tensor[:4]])
