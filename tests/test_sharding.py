"""Cuts over the tensor-parallel ranks: every element on one rank, whole heads, padding at the end."""

from math import ceil, prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.sharding import Chunk, ParamSharding, Run


@st.composite
def cuts(draw):
    """A sharding and a size that it can be cut over."""
    tp_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    padded = draw(st.booleans())
    parts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    sizes = parts if padded else [part * tp_size for part in parts]
    dim = draw(st.integers(0, 1))
    other = draw(st.integers(1, 3))
    named = len(sizes) > 1 or draw(st.booleans())
    sharding = ParamSharding(
        name="w",
        shape=(sum(sizes), other) if dim == 0 else (other, sum(sizes)),
        dim=dim,
        chunks=tuple(Chunk(name=f"chunk{i}", size=size) for i, size in enumerate(sizes)) if named else (),
        padded=padded,
    )
    return sharding, sizes, tp_size


def split(sharding, whole, tp_size):
    """The local tensors of all ranks; -1 where there is padding."""
    parts = []
    for rank in range(tp_size):
        local = torch.full(sharding.local_shape(tp_size), -1)
        for run in sharding.runs(rank, tp_size):
            piece = whole.narrow(sharding.dim, run.global_start, run.length)
            local.narrow(sharding.dim, run.local_start, run.length).copy_(piece)
        parts.append(local)
    return parts


def join(sharding, parts):
    """The whole from all ranks' local tensors; -2 where nobody has an element."""
    whole = torch.full(sharding.shape, -2)
    for rank, local in enumerate(parts):
        for run in sharding.runs(rank, len(parts)):
            piece = local.narrow(sharding.dim, run.local_start, run.length)
            whole.narrow(sharding.dim, run.global_start, run.length).copy_(piece)
    return whole


@given(cuts())
def test_the_ranks_partition_every_index(cut):
    sharding, sizes, tp_size = cut
    held = [
        index
        for rank in range(tp_size)
        for run in sharding.runs(rank, tp_size)
        for index in range(run.global_start, run.global_start + run.length)
    ]
    assert sorted(held) == list(range(sum(sizes)))


@given(cuts())
def test_join_undoes_split(cut):
    sharding, _, tp_size = cut
    whole = torch.arange(prod(sharding.shape)).view(sharding.shape)
    parts = split(sharding, whole, tp_size)
    assert torch.equal(join(sharding, parts), whole)
    num_padding = sum(int((part == -1).sum()) for part in parts)
    assert num_padding == sum(part.numel() for part in parts) - sharding.num_elements
    assert sharding.padded or num_padding == 0


@given(cuts())
def test_every_rank_has_its_part_of_every_chunk_in_the_same_place(cut):
    sharding, sizes, tp_size = cut
    parts = [ceil(size / tp_size) for size in sizes]
    assert sharding.local_shape(tp_size)[sharding.dim] == sum(parts)
    starts = [(sum(sizes[:i]), sum(parts[:i])) for i in range(len(sizes))]
    for rank in range(tp_size):
        expected = [
            Run(global_start=start + part * rank, local_start=local, length=min(part, size - part * rank))
            for (start, local), size, part in zip(starts, sizes, parts)
            if part * rank < size
        ]
        assert list(sharding.runs(rank, tp_size)) == expected


@given(st.integers(1, 400), st.sampled_from([1, 2, 3, 4, 8]))
def test_padding_stands_on_the_last_ranks_only(size, tp_size):
    sharding = ParamSharding(name="embedding.weight", shape=(size, 4), dim=0, padded=True)
    lengths = [sum(run.length for run in sharding.runs(rank, tp_size)) for rank in range(tp_size)]
    full = ceil(size / tp_size)
    assert sum(lengths) == size and lengths == sorted(lengths, reverse=True)
    assert all(length in (0, full) for i, length in enumerate(lengths) if i != size // full)


def test_a_vocabulary_of_50257_over_4():
    sharding = ParamSharding(name="embedding.weight", shape=(50257, 768), dim=0, padded=True)
    assert sharding.local_shape(4) == (12565, 768)
    assert [run.length for rank in range(4) for run in sharding.runs(rank, 4)] == [12565, 12565, 12565, 12562]
    assert sharding.num_elements == 50257 * 768


def test_a_rank_may_hold_nothing_but_padding():
    sharding = ParamSharding(name="embedding.weight", shape=(5, 2), dim=0, padded=True)
    assert [len(sharding.runs(rank, 4)) for rank in range(4)] == [1, 1, 1, 0]
    assert sharding.local_shape(4) == (2, 2)


def test_fused_qkv_gives_each_rank_whole_heads():
    """8 query heads, 4 key-value heads of 16: the picture in the module's docstring."""
    head = 16
    chunks = (Chunk(name="q", size=8 * head), Chunk(name="k", size=4 * head), Chunk(name="v", size=4 * head))
    sharding = ParamSharding(name="qkv", shape=(16 * head, 64), dim=0, chunks=chunks)
    held = [(run.global_start // head, run.length // head) for run in sharding.runs(1, 2)]
    assert held == [(4, 4), (10, 2), (14, 2)]
    for tp_size in (1, 2, 4):
        for rank in range(tp_size):
            for run in sharding.runs(rank, tp_size):
                assert run.global_start % head == run.local_start % head == run.length % head == 0


def test_a_replicated_parameter_is_whole_on_every_rank():
    sharding = ParamSharding(name="norm.weight", shape=(48,))
    assert sharding.local_shape(4) == (48,)
    assert {sharding.runs(rank, 4) for rank in range(4)} == {(Run(global_start=0, local_start=0, length=48),)}


def test_what_does_not_divide_must_be_padded():
    sharding = ParamSharding(name="mlp.up.weight", shape=(10, 4), dim=0)
    with pytest.raises(AssertionError, match="mlp.up.weight: 10 over 4"):
        sharding.local_shape(4)


def test_chunks_must_add_up():
    with pytest.raises(AssertionError, match="qkv"):
        ParamSharding(name="qkv", shape=(12, 4), dim=0, chunks=(Chunk(name="q", size=8), Chunk(name="k", size=2)))
