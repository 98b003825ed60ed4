"""AdamW on bf16 weights and moments is torch's formula in fp32, rounded, with the same bits for any block, range and
rank."""

import pytest
import torch

from parallel3d.config.sections.optimizer import OptimizerConfig
from parallel3d.inprocess.world import run_threads
from parallel3d.optim.parameter_noise import ParameterNoise
from parallel3d.optim.update_rules.update_rule import UpdateStep
from parallel3d.optim.updater import Updaters
from parallel3d.parallel.sharding import TpShard
from parallel3d.random_keys import bits, key_of
from tests.support.optimizer_ranks import NUM_STEPS, SHARDINGS, Rank, cut_local

ADAMW = Updaters.build(OptimizerConfig(learning_rate=1.0)).element
STEP = UpdateStep(number=3, learning_rate=1e-2, peak_learning_rate=1e-2, grad_scale=0.25)


def tensors(num_elements=5000, dtype=torch.bfloat16):
    numbers = torch.Generator().manual_seed(4)
    draw = lambda: torch.randn(num_elements, generator=numbers).to(dtype)  # noqa: E731
    return draw(), torch.stack([draw() * 0.1, draw().square()]), draw()


def noise(span):
    return bits(key_of("update", 1, 2, "w"), torch.arange(span.start, span.stop))


def update(block=None, noise=noise, dtype=torch.bfloat16):
    weights, moments, grads = tensors(dtype=dtype)
    ADAMW.update(
        weights, moments, grads, STEP, weight_decay=0.1, noise=noise, **({"block_size": block} if block else {})
    )
    return torch.cat([weights[None], moments])


def fused(dtype):
    weights, moments, grads = (tensor.to(dtype) for tensor in tensors())
    ADAMW.update(weights, moments, grads, STEP, weight_decay=0.1)
    return torch.cat([weights[None], moments])


@pytest.mark.parametrize("block", [1, 7, 64, 1000, 4096])
@pytest.mark.parametrize("noise", [noise, None], ids=["stochastic", "nearest"])
def test_the_block_decides_no_bit(block, noise):
    if block > 1:
        assert torch.equal(update(block, noise), update(None, noise))
    else:
        assert torch.equal(update(block, noise)[:, :300], update(None, noise)[:, :300])


@pytest.mark.parametrize("noise", [noise, None], ids=["stochastic", "nearest"])
def test_results_are_torchs_to_one_rounding(noise):
    """Stochastic rounding is off by less than a step of 2**-7, to one of the neighbours; to nearest, by half a step."""
    exact = fused(torch.float64)
    step = 2.0 ** (exact.abs().log2().floor() - 7)
    bound = (1.0 if noise else 0.5) * step * (1 + 1e-3)
    assert ((update(noise=noise).double() - exact).abs() <= bound).all()


def test_the_three_results_are_rounded_apart():
    """Each by 16 bits of its own: how the weight is rounded is independent of how the moments are."""
    exact, got = fused(torch.float64), update().double()
    ups = (got > exact).double()
    assert ((ups.mean(1) - 0.5).abs() < 0.1).all()
    assert (torch.corrcoef(ups) - torch.eye(3)).abs().max() < 5 / 5000**0.5


def test_updates_far_below_a_step_of_the_weights_arrive_on_average():
    """100 updates of 1e-4 from 1, whose neighbour is 3.9e-3 below: to nearest it stays, with noise it gets to 0.99."""
    ends = {}
    for name, words in (("stochastic", True), ("nearest", False)):
        weights, moments = torch.ones(4096, dtype=torch.bfloat16), torch.zeros(2, 4096, dtype=torch.bfloat16)
        for number in range(1, 101):
            draw = lambda span, n=number: bits(key_of("update", 1, n, "w"), torch.arange(span.start, span.stop))  # noqa: E731
            step = UpdateStep(number=number, learning_rate=1e-4, peak_learning_rate=1e-4, grad_scale=1.0)
            grads = torch.ones(4096, dtype=torch.bfloat16)
            ADAMW.update(weights, moments, grads, step, weight_decay=0.0, noise=draw if words else None)
        ends[name] = weights.float().mean().item()
    assert ends["nearest"] == 1.0
    # sqrt(100 x 1e-4 x 3.9e-3 / 4096) = 1e-4 is one standard error; rounded moments change the updates' size a little.
    assert ends["stochastic"] == pytest.approx(0.99, abs=1e-3)


# --- buckets ----------------------------------------------------------------------------------------------------------


def train(tp_size, dp_size, policy="bf16_sr", **settings):
    """Returns for each rank the local weights at the end, and the rank."""

    def body(number, world):
        rank = Rank(number, world, tp_size=tp_size, dp_size=dp_size, policy=policy, **settings)
        for step in range(NUM_STEPS):
            rank.step(step)
        rank.optimizer.finish_gather()
        return rank.weights(), rank

    return run_threads(tp_size * dp_size, body)


@pytest.mark.parametrize("policy", ["bf16_sr", "bf16_pure"])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_tensor_parallel_parts_are_parts_of_the_whole(tp_size, policy):
    """Fused blocks, padding, both dimensions. The gradients are exact in bf16, so only the noise could differ."""
    ((whole, _),) = train(1, 1, policy)
    for tp_rank, (local, _) in enumerate(train(tp_size, 1, policy)):
        for sharding in SHARDINGS:
            expected = cut_local(sharding, whole[sharding.name], TpShard(rank=tp_rank, size=tp_size))
            assert torch.equal(local[sharding.name], expected), sharding.name


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "settings",
    [dict(zero_stage=0), dict(zero_backups=1), dict(bucket_bytes=100), dict(bucket_bytes=10**6)],
    ids=str,
)
@pytest.mark.parametrize("dp_size", [2, 3])
def test_ranges_backups_and_buckets_decide_no_bit(dp_size, settings):
    plain, other = train(1, dp_size), train(1, dp_size, **settings)
    for (mine, rank), (yours, _) in zip(other, plain):
        assert all(torch.equal(mine[name], yours[name]) for name in yours)
        for bucket in rank.buckets:
            assert {shard.states.dtype for shard in bucket.shards} == {torch.bfloat16}


def test_a_backup_is_the_same_as_what_it_backs_up():
    results = [rank for _, rank in train(2, 3, zero_backups=1)]
    held = {}
    for rank in results:
        for number, bucket in enumerate(rank.state()):
            for span, state in bucket.items():
                held.setdefault((rank.coordinates.tp, number, span), []).append(state)
    assert all(len(states) == 2 and torch.equal(*states) for states in held.values())


def test_state_without_master_weights_takes_four_bytes_an_element():
    ((_, rank),) = train(1, 1)
    assert rank.optimizer.state_bytes() == sum(4 * bucket.weights.numel() for bucket in rank.buckets)


def test_the_key_is_all_that_names_the_noise():
    """The key is seed, iteration and parameter. The rank only decides which elements it needs."""
    noises = [ParameterNoise(seed=7, tp=TpShard(rank=rank, size=4)) for rank in range(4)]
    assert len({each.key("update", 3, name="w") for each in noises}) == 1
    first = noises[0]
    others = {
        first.key("update", 4, name="w"),
        first.key("update", 3, name="v"),
        ParameterNoise(seed=8, tp=TpShard(rank=0, size=4)).key("update", 3, name="w"),
    }
    assert len(others | {first.key("update", 3, name="w")}) == 4
