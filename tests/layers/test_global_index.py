"""Indices on a rank and in the whole parameter, against a whole that is sharded by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.layers import init
from parallel3d.layers.global_index import global_index
from parallel3d.layers.init import initial_value
from parallel3d.parallel.sharding import FusedBlock, ParamSharding, TpShard
from parallel3d.random_keys import key_of, normal


@st.composite
def shardings(draw):
    """Draws a parameter of 1 to 3 dimensions, and one rank's share."""
    tp_size = draw(st.sampled_from([1, 2, 3, 4]))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    kind = draw(st.sampled_from(["even", "chunks", "shared", "padded"]))
    fused_blocks = ()
    if dim is not None and kind == "even":
        shape[dim] *= tp_size
    elif dim is not None and kind == "chunks":
        fused_blocks = tuple(FusedBlock(name=n, size=tp_size * draw(st.integers(1, 3))) for n in "qkv")
        shape[dim] = sum(chunk.size for chunk in fused_blocks)
    elif dim is not None and kind == "shared":  # each half of the ranks, or all, hold the same part
        parts = draw(st.sampled_from([1, 2])) if tp_size % 2 == 0 else 1
        q, kv = (
            FusedBlock(name="q", size=tp_size),
            FusedBlock(name="kv", size=parts * draw(st.integers(1, 3)), max_parts=parts),
        )
        fused_blocks = (q, kv)
        shape[dim] = q.size + kv.size
    padded = dim is not None and kind == "padded"
    sharding = ParamSharding(
        name="w",
        shape=tuple(shape),
        dim=dim,
        fused_blocks=fused_blocks,
        padded=padded,
        init_std=draw(st.sampled_from([0.5, 1.0])),
    )
    return sharding, TpShard(rank=draw(st.integers(0, tp_size - 1)), size=tp_size)


def cut_by_hand(sharding, tp):
    """The rank's share of a parameter whose elements are their own indices; negative for padding."""
    whole = torch.arange(sharding.num_elements).view(sharding.shape)
    local = torch.full(sharding.local_shape(tp.size), -1)
    for run in sharding.runs(tp):
        dim = sharding.dim or 0
        local.narrow(dim, run.local_start, run.length).copy_(whole.narrow(dim, run.global_start, run.length))
    return local.view(-1)


@given(shardings(), st.data())
def test_every_span_has_the_indices_of_a_cut_by_hand(drawn, data):
    sharding, tp = drawn
    expected = cut_by_hand(sharding, tp)
    start = data.draw(st.integers(0, len(expected) - 1))
    stop = data.draw(st.integers(start + 1, len(expected)))
    index = global_index(sharding, range(start, stop), tp=tp)
    assert index.dtype is torch.int64
    assert torch.equal(index.clamp(min=-1), expected[start:stop])


@given(shardings())
def test_initial_values_are_those_of_their_global_indices(drawn):
    sharding, tp = drawn
    index = cut_by_hand(sharding, tp)
    value = initial_value(sharding, seed=3, tp=tp)
    assert value.shape == sharding.local_shape(tp.size)
    expected = torch.where(index < 0, 0.0, normal(key_of("init", 3, "w"), index) * sharding.init_std)
    assert torch.equal(value.view(-1), expected)


@pytest.mark.parametrize("init_std", [None, 0.0, 0.02])
def test_initial_values_are_made_on_their_device_in_blocks_of_any_size(monkeypatch, init_std):
    """On a meta device any mixture with host tensors would fail."""
    sharding, tp = ParamSharding(name="a", shape=(8, 30), dim=0, init_std=init_std), TpShard(rank=1, size=2)
    value = initial_value(sharding, seed=3, tp=tp)
    monkeypatch.setattr(init, "_BLOCK", 7)
    assert torch.equal(initial_value(sharding, seed=3, tp=tp), value)
    there = initial_value(sharding, seed=3, tp=tp, device="meta")
    assert there.device.type == "meta" and there.shape == value.shape
