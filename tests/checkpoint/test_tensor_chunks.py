"""The slice algebra: whatever the cut, every element of every tensor is written once, and found again."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.checkpoint.tensor_chunks import (
    boxes,
    fused_block_name,
    overlap,
    tensor_chunks_of,
    tensors_of,
    written_span,
)
from parallel3d.optim.bucket_plan import plan_buckets
from parallel3d.optim.shard_map import plan_shard_map
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.sharding import FusedBlock, ParamSharding, TpShard

QKV = (
    FusedBlock(name="q", size=24),
    FusedBlock(name="k", size=8, max_parts=2),
    FusedBlock(name="v", size=8, max_parts=2),
)
SHARDINGS = (
    ParamSharding(name="embedding.weight", shape=(37, 6), dim=0, padded=True),
    ParamSharding(name="a.qkv.weight", shape=(40, 6), dim=0, fused_blocks=QKV),
    ParamSharding(name="a.qkv.bias", shape=(40,), dim=0, fused_blocks=QKV, is_norm_or_bias=True),
    ParamSharding(name="a.output.weight", shape=(6, 24), dim=1),
    ParamSharding(name="norm.weight", shape=(6,), is_norm_or_bias=True),
    ParamSharding(name="positions.weight", shape=(5, 6)),
)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_range_in_order(shape, data):
    start = data.draw(st.integers(0, prod(shape) - 1))
    stop = data.draw(st.integers(start + 1, prod(shape)))
    index = np.arange(prod(shape)).reshape(shape)
    found = [*boxes(start, stop, tuple(shape))]
    parts = [index[tuple(slice(a, a + n) for a, n in zip(*box))].reshape(-1) for box in found]
    assert np.concatenate(parts).tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1


@given(
    st.sampled_from((1, 2, 4, 8)),
    st.integers(1, 4),
    st.sampled_from((0, 1)),
    st.sampled_from((0, 1)),
    st.integers(1, 400),
)
def test_every_element_is_written_once_and_found_by_all(tp_size, dp_size, zero_stage, zero_backups, bucket_elements):
    grid = Grid.uniform(tp_size=tp_size, pp_size=1, dp_size=dp_size)
    plans = plan_buckets(SHARDINGS, tp_size=tp_size, bucket_elements=bucket_elements, decay_norms_and_biases=False)
    by_name = {sharding.name: sharding for sharding in SHARDINGS}
    shapes = {name: shape for sharding in SHARDINGS for name, shape in tensors_of(sharding).items()}
    written = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for rank in grid.ranks:
        coordinates = grid.coordinates(rank)
        size = dict(tp=TpShard(rank=coordinates.tp, size=tp_size))
        shard_map = plan_shard_map(grid, 0, coordinates.tp, zero_stage=zero_stage, zero_backups=zero_backups, hosts={})
        for plan in plans:
            span, whole = written_span(plan, shard_map, rank), range(plan.num_elements)
            for param_slot in plan.param_slots:
                sharding = by_name[param_slot.name]
                for tensor_chunk in tensor_chunks_of(sharding, param_slot, span, with_copies=False, **size):
                    written[tensor_chunk.tensor][rectangle(tensor_chunk)] += 1
                    assert_in(tensor_chunk, span)
                found = tensor_chunks_of(sharding, param_slot, whole, with_copies=True, **size)
                rows = sum(run.length for run in sharding.runs(size["tp"]))
                assert sum(tensor_chunk.num_elements for tensor_chunk in found) == rows * row_length(sharding)
    assert all((counts == 1).all() for counts in written.values())


def row_length(sharding):
    return sharding.num_elements // sharding.shape[sharding.dim or 0]


def rectangle(tensor_chunk):
    return tuple(slice(a, a + n) for a, n in zip(tensor_chunk.start, tensor_chunk.shape))


def assert_in(tensor_chunk, span):
    last = tensor_chunk.offset + sum((n - 1) * stride for n, stride in zip(tensor_chunk.shape, tensor_chunk.strides))
    assert tensor_chunk.offset in span and last in span


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_pieces_stand_where_the_local_share_has_them(tp_size):
    """Rank by rank: the local share, made of global indices, read by offsets and strides."""
    for sharding in SHARDINGS:
        (plan,) = plan_buckets([sharding], tp_size=tp_size, bucket_elements=10**6, decay_norms_and_biases=False)
        whole, dim = np.arange(sharding.num_elements).reshape(sharding.shape), sharding.dim or 0
        starts, begin = {}, 0
        for name, shape in tensors_of(sharding).items():
            starts[name] = begin
            begin += shape[dim]
        for tp_rank in range(tp_size):
            local = np.full(sharding.local_shape(tp_size), -1)
            for run in sharding.runs(TpShard(rank=tp_rank, size=tp_size)):
                there, here = [[slice(None)] * whole.ndim for _ in range(2)]
                there[dim] = slice(run.global_start, run.global_start + run.length)
                here[dim] = slice(run.local_start, run.local_start + run.length)
                local[tuple(here)] = whole[tuple(there)]
            flat = local.reshape(-1)
            where = dict(tp=TpShard(rank=tp_rank, size=tp_size), with_copies=True)
            for tensor_chunk in tensor_chunks_of(
                sharding, plan.param_slots[0], range(3, plan.num_elements - 2), **where
            ):
                values = np.lib.stride_tricks.as_strided(
                    flat[tensor_chunk.offset :],
                    tensor_chunk.shape,
                    [stride * flat.itemsize for stride in tensor_chunk.strides],
                )
                first = list(tensor_chunk.start)
                first[dim] += starts[tensor_chunk.tensor]
                assert (values == whole[tuple(slice(a, a + n) for a, n in zip(first, tensor_chunk.shape))]).all()


def test_names_of_chunks():
    assert fused_block_name("layers.0.attention.qkv.weight", "q") == "layers.0.attention.q.weight"
    assert fused_block_name("layers.11.mlp.gate_up.weight", "up") == "layers.11.mlp.up.weight"
    assert fused_block_name("qkv.bias", "v") == "v.bias"


def test_overlap():
    assert overlap((0, 2), (4, 4), (3, 0), (5, 3)) == ((3, 2), (1, 1))
    assert overlap((0,), (4,), (4,), (1,)) is None
