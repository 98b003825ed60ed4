"""Shardings over tensor-parallel ranks: every element on one rank, whole heads, padding at the end."""

from collections import Counter
from math import ceil, prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.parallel.sharding import FusedBlock, IndexRun, ParamSharding, TpShard


@st.composite
def sharding_cases(draw):
    """Draws a sharding, (size, copies) of its fused blocks, and a number of ranks that it supports."""
    tp_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    padded = draw(st.booleans())
    parts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dim = draw(st.integers(0, 1))
    other = draw(st.integers(1, 3))
    named = len(parts) > 1 or draw(st.booleans())
    divisors = [n for n in range(1, tp_size + 1) if tp_size % n == 0]
    copies = [draw(st.sampled_from(divisors)) if named and not padded else 1 for _ in parts]
    sizes = parts if padded else [part * tp_size // n for part, n in zip(parts, copies)]
    fused_blocks = [
        FusedBlock(name=f"chunk{i}", size=size, max_parts=tp_size // n if n > 1 else None)
        for i, (size, n) in enumerate(zip(sizes, copies))
    ]
    sharding = ParamSharding(
        name="w",
        shape=(sum(sizes), other) if dim == 0 else (other, sum(sizes)),
        dim=dim,
        fused_blocks=tuple(fused_blocks) if named else (),
        padded=padded,
    )
    return sharding, list(zip(sizes, copies)), tp_size


def split(sharding, whole, tp_size):
    """The local tensors of all ranks; -1 where there is padding."""
    parts = []
    for rank in range(tp_size):
        local = torch.full(sharding.local_shape(tp_size), -1)
        for run in sharding.runs(TpShard(rank=rank, size=tp_size)):
            piece = whole.narrow(sharding.dim, run.global_start, run.length)
            local.narrow(sharding.dim, run.local_start, run.length).copy_(piece)
        parts.append(local)
    return parts


def join(sharding, parts):
    """The whole from all ranks' local tensors; -2 where no rank has an element."""
    whole = torch.full(sharding.shape, -2)
    for rank, local in enumerate(parts):
        for run in sharding.runs(TpShard(rank=rank, size=len(parts))):
            piece = local.narrow(sharding.dim, run.local_start, run.length)
            whole.narrow(sharding.dim, run.global_start, run.length).copy_(piece)
    return whole


@given(sharding_cases())
def test_every_index_is_on_as_many_ranks_as_there_are_copies(case):
    sharding, fused_blocks, tp_size = case
    held = Counter(
        (index, run.copies)
        for rank in range(tp_size)
        for run in sharding.runs(TpShard(rank=rank, size=tp_size))
        for index in range(run.global_start, run.global_start + run.length)
    )
    copies = [n for size, n in fused_blocks for _ in range(size)]
    assert held == {(index, n): n for index, n in enumerate(copies)}
    assert sharding.copies(tp_size) == max(copies)


@given(sharding_cases())
def test_the_first_of_the_ranks_that_share_indices_has_a_number_that_copies_divide(case):
    """So `rank % copies == 0` names one owner of each index."""
    sharding, fused_blocks, tp_size = case
    owned = [
        index
        for rank in range(tp_size)
        for run in sharding.runs(TpShard(rank=rank, size=tp_size))
        if rank % run.copies == 0
        for index in range(run.global_start, run.global_start + run.length)
    ]
    assert sorted(owned) == list(range(sum(size for size, _ in fused_blocks)))


@given(sharding_cases())
def test_join_undoes_split(case):
    sharding, fused_blocks, tp_size = case
    whole = torch.arange(prod(sharding.shape)).view(sharding.shape)
    parts = split(sharding, whole, tp_size)
    assert torch.equal(join(sharding, parts), whole)
    num_padding = sum(int((part == -1).sum()) for part in parts)
    row = sharding.num_elements // sharding.shape[sharding.dim]
    assert num_padding == sum(part.numel() for part in parts) - row * sum(size * n for size, n in fused_blocks)
    assert sharding.padded or num_padding == 0


@given(sharding_cases())
def test_every_rank_has_its_part_of_every_chunk_in_the_same_place(case):
    sharding, fused_blocks, tp_size = case
    parts = [ceil(size * n / tp_size) for size, n in fused_blocks]
    assert sharding.local_shape(tp_size)[sharding.dim] == sum(parts)
    starts = [(sum(size for size, _ in fused_blocks[:i]), sum(parts[:i])) for i in range(len(fused_blocks))]
    for rank in range(tp_size):
        expected = [
            IndexRun(
                global_start=start + part * (rank // n),
                local_start=local,
                length=min(part, size - part * (rank // n)),
                copies=n,
            )
            for (start, local), (size, n), part in zip(starts, fused_blocks, parts)
            if part * (rank // n) < size
        ]
        assert list(sharding.runs(TpShard(rank=rank, size=tp_size))) == expected


@given(st.integers(1, 400), st.sampled_from([1, 2, 3, 4, 8]))
def test_padding_stands_on_the_last_ranks_only(size, tp_size):
    sharding = ParamSharding(name="embedding.weight", shape=(size, 4), dim=0, padded=True)
    lengths = [sum(run.length for run in sharding.runs(TpShard(rank=rank, size=tp_size))) for rank in range(tp_size)]
    full = ceil(size / tp_size)
    assert sum(lengths) == size and lengths == sorted(lengths, reverse=True)
    assert all(length in (0, full) for i, length in enumerate(lengths) if i != size // full)


def test_a_vocabulary_of_50257_over_4():
    sharding = ParamSharding(name="embedding.weight", shape=(50257, 768), dim=0, padded=True)
    assert sharding.local_shape(4) == (12565, 768)
    runs = [run for rank in range(4) for run in sharding.runs(TpShard(rank=rank, size=4))]
    assert [run.length for run in runs] == [12565, 12565, 12565, 12562]
    assert sharding.num_elements == 50257 * 768


def test_a_rank_may_hold_nothing_but_padding():
    sharding = ParamSharding(name="embedding.weight", shape=(5, 2), dim=0, padded=True)
    assert [len(sharding.runs(TpShard(rank=rank, size=4))) for rank in range(4)] == [1, 1, 1, 0]
    assert sharding.local_shape(4) == (2, 2)


def test_fused_qkv_gives_each_rank_whole_heads():
    """8 query heads, 4 key-value heads of 16: the picture in the module's docstring."""
    head = 16
    fused_blocks = (
        FusedBlock(name="q", size=8 * head),
        FusedBlock(name="k", size=4 * head),
        FusedBlock(name="v", size=4 * head),
    )
    sharding = ParamSharding(name="qkv", shape=(16 * head, 64), dim=0, fused_blocks=fused_blocks)
    held = [(run.global_start // head, run.length // head) for run in sharding.runs(TpShard(rank=1, size=2))]
    assert held == [(4, 4), (10, 2), (14, 2)]
    for tp_size in (1, 2, 4):
        for rank in range(tp_size):
            for run in sharding.runs(TpShard(rank=rank, size=tp_size)):
                assert run.global_start % head == run.local_start % head == run.length % head == 0


def test_a_replicated_parameter_is_whole_on_every_rank():
    sharding = ParamSharding(name="norm.weight", shape=(48,))
    assert sharding.local_shape(4) == (48,)
    assert {sharding.runs(TpShard(rank=rank, size=4)) for rank in range(4)} == {
        (IndexRun(global_start=0, local_start=0, length=48, copies=4),)
    }


def test_key_heads_on_more_ranks_than_there_are():
    """The picture in the module's docstring, and HLAT-70B's: 8 key heads on 32 ranks of two query heads each."""
    for num_heads, num_kv_heads, tp_size in ((4, 2, 4), (64, 8, 32)):
        fused_blocks = (
            FusedBlock(name="q", size=num_heads),
            FusedBlock(name="k", size=num_kv_heads, max_parts=num_kv_heads),
            FusedBlock(name="v", size=num_kv_heads, max_parts=num_kv_heads),
        )
        sharding = ParamSharding(name="qkv", shape=(num_heads + 2 * num_kv_heads, 2), dim=0, fused_blocks=fused_blocks)
        assert sharding.copies(tp_size) == tp_size // num_kv_heads and sharding.copies(num_kv_heads) == 1
        for rank in range(tp_size):
            q, k, v = sharding.runs(TpShard(rank=rank, size=tp_size))
            wanted = {head * num_kv_heads // num_heads for head in range(q.global_start, q.global_start + q.length)}
            assert {k.global_start - num_heads} == {v.global_start - num_heads - num_kv_heads} == wanted
            assert k.length == v.length == 1
    with pytest.raises(AssertionError, match="6 ranks can't share 4 parts of k"):
        FusedBlock(name="k", size=4, max_parts=4).copies(6)


def test_what_does_not_divide_must_be_padded():
    sharding = ParamSharding(name="mlp.up.weight", shape=(10, 4), dim=0)
    with pytest.raises(AssertionError, match="mlp.up.weight: 10 over 4"):
        sharding.local_shape(4)


def test_chunks_must_add_up():
    with pytest.raises(AssertionError, match="qkv"):
        ParamSharding(
            name="qkv", shape=(12, 4), dim=0, fused_blocks=(FusedBlock(name="q", size=8), FusedBlock(name="k", size=2))
        )
