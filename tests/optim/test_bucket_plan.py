"""Bucket plans: each parameter is in one bucket, with others of its key; ranges are equal and aligned."""

from itertools import product
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.optim.bucket_plan import ALIGNMENT, PARAM_ALIGNMENT, BucketKey, plan_buckets
from parallel3d.parallel.sharding import FusedBlock, ParamSharding, TpShard


@st.composite
def models(draw):
    """Draws shardings in forward order, of every kind that layers declare."""
    shardings = []
    for number in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(["column", "row", "norm", "bias", "vocabulary", "qkv", "qkv_bias"]))
        width = draw(st.integers(1, 40))
        shape, dim = {
            "column": ((8 * width, 16), 0),
            "row": ((16, 8 * width), 1),
            "norm": ((width,), None),
            "bias": ((8 * width,), 0),
            "vocabulary": ((width, 16), 0),
            "qkv": ((12 * width, 16), 0),
            "qkv_bias": ((12 * width,), 0),
        }[kind]
        max_parts = draw(st.sampled_from([1, 2, 4]))
        fused_blocks = (
            FusedBlock(name="q", size=8 * width),
            FusedBlock(name="kv", size=4 * width, max_parts=max_parts),
        )
        shardings.append(
            ParamSharding(
                name=f"{number}.{kind}",
                shape=shape,
                dim=dim,
                padded=kind == "vocabulary",
                fused_blocks=fused_blocks if "qkv" in kind else (),
                partial_grad=kind == "norm" and draw(st.booleans()),
                is_norm_or_bias=kind in ("norm", "bias", "qkv_bias"),
            )
        )
    if draw(st.booleans()):
        tied = ParamSharding(name="tied", shape=(draw(st.integers(1, 40)), 16), dim=0, padded=True, tied=True)
        shardings.insert(draw(st.sampled_from([0, len(shardings)])), tied)  # on the first stage, on the last
    return shardings


SETTINGS = st.fixed_dictionaries(
    {
        "tp_size": st.sampled_from([1, 2, 4, 8]),
        "bucket_elements": st.sampled_from([1, 100, 2000, 10**9]),
        "decay_norms_and_biases": st.booleans(),
    }
)


@given(models(), SETTINGS)
def test_every_parameter_has_one_place_and_no_two_share_an_element(shardings, settings):
    plans = plan_buckets(shardings, **settings)
    by_name = {sharding.name: sharding for sharding in shardings}
    names = [param_slot.name for plan in plans for param_slot in plan.param_slots]
    assert sorted(names) == sorted(by_name)
    for plan in plans:
        end = 0
        for param_slot in plan.param_slots:
            assert param_slot.offset % PARAM_ALIGNMENT == 0 and end <= param_slot.offset < end + PARAM_ALIGNMENT
            assert param_slot.shape == by_name[param_slot.name].local_shape(settings["tp_size"])
            assert param_slot.length == prod(param_slot.shape)
            end = param_slot.offset + param_slot.length
        assert plan.num_elements == end


@given(models(), SETTINGS)
def test_a_bucket_holds_only_what_is_treated_alike(shardings, settings):
    by_name = {sharding.name: sharding for sharding in shardings}
    for plan in plan_buckets(shardings, **settings):
        for sharding in (by_name[param_slot.name] for param_slot in plan.param_slots):
            assert plan.key == BucketKey(
                decay=settings["decay_norms_and_biases"] or not sharding.is_norm_or_bias,
                tp_replicated=sharding.dim is None,
                partial_grad=sharding.partial_grad,
                copies=sharding.copies(settings["tp_size"]),
                tied=sharding.tied,
            )


@given(models(), SETTINGS, st.integers(1, 3))
def test_every_element_of_the_model_is_counted_once(shardings, settings, num_ranges):
    """Summed over the ranks of a tensor-parallel group and the ranges of their optimizer state."""
    tp_size, by_name = settings["tp_size"], {sharding.name: sharding for sharding in shardings}
    counts = {sharding.name: torch.zeros(sharding.shape, dtype=torch.int64) for sharding in shardings}
    for plan, tp_rank in product(plan_buckets(shardings, **settings), range(tp_size)):
        flat = torch.zeros(plan.length(num_ranges), dtype=torch.int64)
        for number in range(num_ranges):
            span = plan.range_of(number, num_ranges)
            for part in plan.counted(span, tp_rank):
                assert span.start <= part.start < part.stop <= span.stop
                flat[part.start : part.stop] += 1
        for param_slot in plan.param_slots:
            sharding = by_name[param_slot.name]
            local = flat[param_slot.offset : param_slot.offset + param_slot.length].view(param_slot.shape)
            for run in sharding.runs(TpShard(rank=tp_rank, size=tp_size)):
                part = local.narrow(sharding.dim or 0, run.local_start, run.length)
                counts[param_slot.name].narrow(sharding.dim or 0, run.global_start, run.length).add_(part)
    for name, count in counts.items():
        assert (count == 1).all(), name


@given(models(), SETTINGS, st.integers(1, 6))
def test_ranges_are_equal_aligned_and_cover_the_bucket(shardings, settings, num_ranges):
    for plan in plan_buckets(shardings, **settings):
        length = plan.length(num_ranges)
        assert plan.num_elements <= length < plan.num_elements + num_ranges * ALIGNMENT
        ranges = [plan.range_of(number, num_ranges) for number in range(num_ranges)]
        assert [index for each in ranges for index in each] == list(range(length))
        assert {len(each) for each in ranges} == {length // num_ranges}
        assert all(each.start % ALIGNMENT == 0 for each in ranges)


@given(models(), SETTINGS, st.integers(1, 12))
def test_the_capacity_suffices_for_any_number_of_ranges_that_is_left(shardings, settings, max_ranges):
    for plan in plan_buckets(shardings, **settings):
        lengths = [plan.length(num_ranges) for num_ranges in range(1, max_ranges + 1)]
        assert plan.capacity(max_ranges) == max(lengths)
        assert plan.capacity(max_ranges) < plan.num_elements + max_ranges * ALIGNMENT


@given(models(), SETTINGS)
def test_buckets_fill_up_in_backward_order(shardings, settings):
    """A bucket is complete with the parameter that reaches the size; only the last bucket of a key is smaller."""
    order = {sharding.name: number for number, sharding in enumerate(reversed(shardings))}
    plans = plan_buckets(shardings, **settings)
    for plan in plans:
        numbers = [order[param_slot.name] for param_slot in plan.param_slots]
        assert numbers == sorted(numbers)
        ends = [param_slot.offset + param_slot.length for param_slot in plan.param_slots]
        assert all(end < settings["bucket_elements"] for end in ends[:-1])
    plans = [plan for plan in plans if not plan.key.tied]
    full = [plan for plan in plans if plan.num_elements >= settings["bucket_elements"]]
    assert plans[: len(full)] == full
    assert [order[p.param_slots[-1].name] for p in full] == sorted(order[p.param_slots[-1].name] for p in full)
    rest = plans[len(full) :]
    assert len({plan.key for plan in rest}) == len(rest)


@given(models(), models(), SETTINGS)
def test_a_tied_parameter_has_the_same_bucket_on_both_stages_and_it_is_the_last(first, last, settings):
    tied = ParamSharding(name="tied", shape=(37, 16), dim=0, padded=True, tied=True)
    stages = [
        plan_buckets(shardings, **settings)
        for shardings in ([tied, *(s for s in first if not s.tied)], [*(s for s in last if not s.tied), tied])
    ]
    for plans in stages:
        assert [param_slot.name for plan in plans if plan.key.tied for param_slot in plan.param_slots] == ["tied"]
        assert plans[-1] == stages[0][-1] and plans[-1].key.tied


def test_an_example():
    shardings = [
        ParamSharding(name="embedding", shape=(101, 4), dim=0, padded=True),
        ParamSharding(name="norm", shape=(4,), is_norm_or_bias=True),
        ParamSharding(name="up", shape=(32, 4), dim=0),
        ParamSharding(name="down", shape=(4, 32), dim=1),
    ]
    settings = dict(tp_size=2, bucket_elements=128, decay_norms_and_biases=False)
    plans = plan_buckets(shardings, **settings)
    assert [[param_slot.name for param_slot in plan.param_slots] for plan in plans] == [
        ["down", "up"],
        ["embedding"],
        ["norm"],
    ]
    assert [plan.num_elements for plan in plans] == [128, 204, 4]
    assert [plan.length(2) for plan in plans] == [128, 256, 128]
    assert [plan.length(3) for plan in plans] == [192, 384, 192]
    assert [plan.capacity(4) for plan in plans] == [256, 384, 256]
    assert [plan.key.decay for plan in plans] == [True, True, False]
    assert plans[0].param_slots[1].offset == 64 and plans[0].range_of(1, 2) == range(64, 128)
