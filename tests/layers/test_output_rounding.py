"""Stochastically rounded outputs of linear layers are unbiased, and the same on any rank and in any micro-batch."""

from dataclasses import replace

import pytest
import torch

from parallel3d.inprocess.world import run_threads
from parallel3d.layers.init import initial_value
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.output_rounding import matmul_for
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.sharding import FusedBlock, TpShard
from parallel3d.parallel.tensor_parallel import TensorParallel, solo_region
from parallel3d.precision.policy import POLICIES
from tests.support.tiny_stages import micro_batch

POLICY = replace(POLICIES["bf16_sr"], rounds_outputs=True)
SEQ, IN, OUT = 4, 16, 24
CHUNKS = (FusedBlock(name="q", size=16), FusedBlock(name="k", size=8))


def linear(kind, tp=None, policy=POLICY):
    context = LayerContext(tp=tp or solo_region(), policy=policy)
    if kind == "column":
        layer = ColumnParallelLinear("w", IN, CHUNKS, init_std=0.5, context=context)
    else:
        layer = RowParallelLinear("w", IN, OUT, init_std=0.5, context=context)
    group = context.tp.group
    whole = initial_value(layer.weight.sharding, seed=3, tp=TpShard(rank=group.rank, size=group.size))
    layer.weight.data.copy_((whole * 8).round() / 8)  # products are exact in fp32, whatever is added first
    return layer


def batch(*slots, **changes):
    return micro_batch(slots=slots, sequence_length=SEQ, **changes)


def tokens(num_sequences):
    numbers = torch.Generator().manual_seed(5)
    return (torch.randint(-64, 65, (num_sequences * SEQ, IN), generator=numbers) / 16).bfloat16()


@pytest.mark.parametrize("kind", ["column", "row"])
def test_sequences_are_rounded_alike_in_any_micro_batch(kind):
    layer, x = linear(kind), tokens(3)
    together = layer(x, batch(4, 9, 2))
    apart = [layer(part, batch(slot)) for slot, part in zip((4, 9, 2), x.split(SEQ))]
    assert torch.equal(together, torch.cat(apart))
    assert torch.equal(torch.cat([layer(x[SEQ:], batch(9, 2))]), together[SEQ:])


@pytest.mark.parametrize("kind", ["column", "row"])
def test_iteration_slot_and_parameter_key_the_noise(kind):
    layer, x = linear(kind), tokens(1)
    plain = layer(x, batch(4))
    assert torch.equal(layer(x, batch(4)), plain)
    assert not torch.equal(layer(x, batch(5)), plain)
    assert not torch.equal(layer(x, batch(4, iteration=4)), plain)
    assert not torch.equal(layer(x, batch(4, seed=8)), plain)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_the_mean_is_the_fp32_product(kind):
    """Over 4,000 iterations, element by element: 5 standard errors of what a rounding of its size scatters."""
    layer, x = linear(kind), tokens(1)[:1].repeat(SEQ, 1)
    exact = x[:1].double() @ layer.weight.detach().double().t()
    runs = torch.cat([layer(x, batch(4, iteration=number)).detach() for number in range(1000)]).double()
    assert len(runs) == 4000
    step = 2.0 ** (exact.abs().log2().floor() - 7)
    assert ((runs.mean(0) - exact).abs() < 5 * 0.5 * step / 4000**0.5).all()
    assert (runs - exact).abs().max() <= step.max()


def test_evaluations_round_to_the_nearest():
    x = tokens(2)
    plain = linear("column", policy=POLICIES["bf16_sr"])(x, batch(4, 9))
    assert torch.equal(linear("column")(x, batch(4, 9, training=False)), plain)
    assert not torch.equal(linear("column")(x, batch(4, 9)), plain)


def run_parts(kind, tp_size, x, cut):
    def body(rank, world):
        group = world.make_group(rank)("tp", tuple(range(tp_size)))
        layer = linear(kind, TensorParallel(group=group))
        return layer, layer(cut(x, rank), batch(4, 9)).detach()

    return run_threads(tp_size, body)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_column_parallel_part_is_a_part_of_the_whole(tp_size):
    x = tokens(2)
    whole = linear("column")(x, batch(4, 9)).detach()
    for rank, (layer, part) in enumerate(run_parts("column", tp_size, x, lambda x, rank: x)):
        runs = layer.weight.sharding.runs(TpShard(rank=rank, size=tp_size))
        expected = torch.cat([whole[:, run.global_start : run.global_start + run.length] for run in runs], 1)
        assert torch.equal(part, expected)


def test_row_parallel_summands_have_noise_of_their_own():
    """Two halves of the same numbers are rounded differently, which no sum would show."""
    x, weight = tokens(2)[:, : IN // 2], linear("row").weight.detach()[:, : IN // 2]

    def body(rank, world):
        layer = linear("row", TensorParallel(group=world.make_group(rank)("tp", (0, 1))))
        return matmul_for(layer.weight, batch(4, 9), tp=layer.tp, policy=POLICY)(x, weight)

    first, second = run_threads(2, body)
    differ = (first != second).double().mean()
    assert 0.1 < differ < 0.6  # of products that lie between two neighbours, a third to a half; some are exact
