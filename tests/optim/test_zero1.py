"""The sharded optimizer against torch's AdamW on plain, whole parameters."""

import itertools

import pytest
import torch
from torch import nn

from parallel3d.layers.init import initial_value
from parallel3d.layers.parameter import ShardedParameter, parameters_of
from parallel3d.optim.zero1 import AdamWSettings, ShardedOptimizer
from parallel3d.precision.policy import POLICIES
from parallel3d.sharding import Chunk, ParamSharding
from parallel3d.testing.threads import run_threads

SEED = 7
LEARNING_RATES = (1e-2, 3e-2, 0.0, 5e-3)
GRAD_SCALES = (1.0, 0.25, 1.0, 0.5)
QKV = (Chunk(name="q", size=24), Chunk(name="k", size=8), Chunk(name="v", size=8))
SHARDINGS = [
    ParamSharding(name="embedding", shape=(37, 12), dim=0, padded=True, init_std=0.5),
    ParamSharding(name="norm", shape=(12,), partial_grad=True, is_norm_or_bias=True),
    ParamSharding(name="qkv", shape=(40, 12), dim=0, chunks=QKV, init_std=0.5),
    ParamSharding(name="output", shape=(12, 24), dim=1, init_std=0.5),
    ParamSharding(name="router", shape=(5, 12), init_std=0.5),
    ParamSharding(name="last_norm", shape=(12,), is_norm_or_bias=True),
]
LAYOUTS = [(tp, dp, zero) for tp, dp, zero in itertools.product((1, 2), (1, 2, 4), (0, 1))]


class Module(nn.Module):
    """One parameter; its forward pass shows the weights that it saw."""

    def __init__(self, sharding, tp_size, dtype):
        super().__init__()
        self.weight = ShardedParameter(sharding, tp_size=tp_size, dtype=dtype)

    def forward(self):
        return self.weight.detach().clone()


def make_stage(tp_size, policy):
    return nn.ModuleList([Module(sharding, tp_size, policy.compute) for sharding in SHARDINGS])


def gradient(sharding, dp_rank, step):
    """The whole gradient of one replica's micro-batches."""
    seed = 1000 * SHARDINGS.index(sharding) + 10 * step + dp_rank
    return torch.randn(sharding.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cut(sharding, whole, tp_rank, tp_size):
    """This rank's share, zeros for padding."""
    if sharding.dim is None:
        return whole
    local = whole.new_zeros(sharding.local_shape(tp_size))
    for run in sharding.runs(tp_rank, tp_size):
        piece = whole.narrow(sharding.dim, run.global_start, run.length)
        local.narrow(sharding.dim, run.local_start, run.length).copy_(piece)
    return local


def local_gradient(sharding, dp_rank, step, tp_rank, tp_size):
    """What the backward pass of one rank adds up: a partial gradient is its tokens' part only."""
    whole = gradient(sharding, dp_rank, step)
    if sharding.partial_grad and tp_size > 1:
        share = 0.25 if tp_rank == 0 else 0.75 / (tp_size - 1)
        return share * whole
    return cut(sharding, whole, tp_rank, tp_size)


def build(rank, world, tp_size, dp_size, zero_stage, *, policy="fp64", bucket_bytes=2000, **switches):
    tp_rank, dp_rank = rank % tp_size, rank // tp_size
    make = world.make_group(rank)
    tp = make(f"tp{dp_rank}", tuple(range(dp_rank * tp_size, (dp_rank + 1) * tp_size)))
    dp = make(f"dp{tp_rank}", tuple(range(tp_rank, tp_size * dp_size, tp_size)))
    stage = make_stage(tp_size, POLICIES[policy])
    optimizer = ShardedOptimizer(
        stage,
        seed=SEED,
        tp=tp,
        dp=dp,
        zero_stage=zero_stage,
        bucket_bytes=bucket_bytes,
        decay_norms_and_biases=False,
        policy=POLICIES[policy],
        settings=AdamWSettings(),
        **{"overlap_reduce": False, "overlap_gather": False, **switches},
        device=torch.device("cpu"),
    )
    return stage, optimizer, (tp_rank, dp_rank)


def backward(stage, tp_rank, dp_rank, tp_size, step):
    """Adds the gradients as the layers do: last parameter first."""
    for parameter in reversed(parameters_of(stage)):
        part = local_gradient(parameter.sharding, dp_rank, step, tp_rank, tp_size)
        parameter.grad_buffer().add_(part)
        parameter.grad_added()


def train(tp_size, dp_size, zero_stage, **settings):
    """By rank: the local weights after every step, the squared norms and the state's bytes."""

    def body(rank, world):
        stage, optimizer, (tp_rank, dp_rank) = build(rank, world, tp_size, dp_size, zero_stage, **settings)
        history, norms = [], []
        for step, (learning_rate, grad_scale) in enumerate(zip(LEARNING_RATES, GRAD_SCALES)):
            optimizer.begin_iteration()
            optimizer.expect_last_backward()
            backward(stage, tp_rank, dp_rank, tp_size, step)
            optimizer.finish_reduction()
            norms.append(optimizer.squared_norm())
            optimizer.update(learning_rate=learning_rate, grad_scale=grad_scale)
            history.append({module.weight.sharding.name: module() for module in stage})
        optimizer.finish_gather()
        return history, norms, optimizer.state_bytes(), optimizer

    return run_threads(tp_size * dp_size, body)


def reference(dp_size, dtype=torch.float64):
    """The same steps with torch.optim.AdamW on whole parameters: weights and squared norms after every step."""
    weights = {
        sharding.name: nn.Parameter(initial_value(sharding, seed=SEED, tp_rank=0, tp_size=1).to(dtype))
        for sharding in SHARDINGS
    }
    decayed = [weights[s.name] for s in SHARDINGS if not s.is_norm_or_bias]
    others = [weights[s.name] for s in SHARDINGS if s.is_norm_or_bias]
    constants = AdamWSettings()
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": constants.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(constants.beta1, constants.beta2),
        eps=constants.eps,
        foreach=False,
    )
    history, norms = [], []
    for step, (learning_rate, grad_scale) in enumerate(zip(LEARNING_RATES, GRAD_SCALES)):
        totals = {s.name: sum(gradient(s, dp_rank, step) for dp_rank in range(dp_size)) for s in SHARDINGS}
        norms.append(sum(total.square().sum() for total in totals.values()))
        for name, total in totals.items():
            weights[name].grad = (total * grad_scale).to(dtype)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        history.append({name: weight.detach().clone() for name, weight in weights.items()})
    return history, norms


@pytest.mark.parametrize("tp_size, dp_size, zero_stage", LAYOUTS)
def test_every_layout_is_adamw_on_the_whole_parameters(tp_size, dp_size, zero_stage):
    expected, expected_norms = reference(dp_size)
    for rank, (history, _, _, _) in enumerate(train(tp_size, dp_size, zero_stage)):
        for step, weights in enumerate(history):
            for sharding in SHARDINGS:
                whole = expected[step][sharding.name]
                ours = weights[sharding.name]
                # fp64: sums of at most four gradients in another order, and one fused formula: some 1e-15 a step.
                difference = (ours - cut(sharding, whole, rank % tp_size, tp_size)).abs().max()
                assert difference < 1e-12, (step, sharding.name)


@pytest.mark.parametrize("tp_size, dp_size, zero_stage", LAYOUTS)
def test_the_norm_counts_every_element_once(tp_size, dp_size, zero_stage):
    _, expected = reference(dp_size)
    results = train(tp_size, dp_size, zero_stage)
    for step, total in enumerate(expected):
        found = sum(norms[step] for _, norms, _, _ in results)
        assert found.dtype is torch.float64
        torch.testing.assert_close(found, total, rtol=1e-12, atol=0)


@pytest.mark.parametrize("zero_stage, dp_size", [(0, 4), (1, 1), (1, 2), (1, 4)])
def test_zero_1_shares_the_state_over_the_replicas(zero_stage, dp_size):
    """Two moments of 8 bytes for each element (fp64: no master weights), padded to 64 elements a range."""
    num_elements = sum(sharding.num_elements for sharding in SHARDINGS)
    for _, _, num_bytes, optimizer in train(1, dp_size, zero_stage):
        num_ranges = dp_size if zero_stage == 1 else 1
        padding = 64 * len(optimizer.buckets)
        assert 16 * num_elements / num_ranges <= num_bytes < 16 * (num_elements / num_ranges + padding)
        moments = [
            value
            for bucket in optimizer.buckets
            for state in bucket.optimizer.state.values()
            for name, value in state.items()
            if name.startswith("exp_avg")
        ]
        assert sum(moment.nbytes for moment in moments) == num_bytes


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("overlap_reduce, overlap_gather", [(True, False), (False, True), (True, True)])
def test_overlap_changes_no_bit(zero_stage, overlap_reduce, overlap_gather):
    plain = train(2, 2, zero_stage)
    overlapped = train(2, 2, zero_stage, overlap_reduce=overlap_reduce, overlap_gather=overlap_gather)
    for (ours, our_norms, _, _), (theirs, their_norms, _, _) in zip(overlapped, plain):
        assert our_norms == their_norms
        for mine, yours in zip(ours, theirs):
            assert all(torch.equal(mine[name], yours[name]) for name in yours)


def test_reductions_start_during_the_last_backward_pass_and_only_then():
    def body(rank, world):
        stage, optimizer, (tp_rank, dp_rank) = build(rank, world, 1, 2, 1, overlap_reduce=True)
        assert len(optimizer.buckets) > 3
        started = []
        optimizer.begin_iteration()
        backward(stage, tp_rank, dp_rank, 1, 0)  # the first of two micro-batches
        started.append(len(optimizer._reducing))
        optimizer.expect_last_backward()
        for parameter in reversed(parameters_of(stage)):
            parameter.grad_buffer().add_(local_gradient(parameter.sharding, dp_rank, 1, tp_rank, 1))
            parameter.grad_added()
            started.append(len(optimizer._reducing))
        optimizer.finish_reduction()
        return started, len(optimizer.buckets), optimizer.squared_norm()

    results = run_threads(2, body)
    (started, num_buckets, _), (other, _, _) = results
    assert started == other == sorted(started)
    assert started[0] == 0 and 0 < started[3] < num_buckets and started[-1] == num_buckets
    sums = [sum(gradient(s, d, step) for d in (0, 1) for step in (0, 1)).square().sum() for s in SHARDINGS]
    torch.testing.assert_close(sum(norm for _, _, norm in results), sum(sums), rtol=1e-12, atol=0)


def test_an_iteration_that_broke_off_leaves_nothing_behind():
    """Gradients were added and a reduction was started: the next iteration's result is as if it had not been."""

    def body(rank, world, break_off):
        stage, optimizer, (tp_rank, dp_rank) = build(rank, world, 1, 2, 1, overlap_reduce=True)
        if break_off:
            optimizer.begin_iteration()
            optimizer.expect_last_backward()
            backward(stage, tp_rank, dp_rank, 1, 3)
        optimizer.begin_iteration()
        backward(stage, tp_rank, dp_rank, 1, 0)
        optimizer.finish_reduction()
        optimizer.update(learning_rate=0.1, grad_scale=1.0)
        return [module() for module in stage]

    for ours, theirs in zip(*(run_threads(2, lambda r, w, b=b: body(r, w, b)) for b in (True, False))):
        assert all(torch.equal(mine, yours) for mine, yours in zip(ours, theirs))


def test_parameters_and_gradients_are_views_of_their_buckets():
    def body(rank, world):
        stage, optimizer, _ = build(rank, world, 1, 1, 1)
        for bucket in optimizer.buckets:
            for parameter, place in zip(bucket.parameters, bucket.plan.places):
                assert parameter.sharding.name == place.name
                assert parameter.data_ptr() == bucket.weights[place.offset :].data_ptr()
                assert parameter.main_grad.data_ptr() == bucket.grads[place.offset :].data_ptr()
                initial = initial_value(parameter.sharding, seed=SEED, tp_rank=0, tp_size=1)
                assert torch.equal(parameter.detach(), initial.double())

    run_threads(1, body)


@pytest.mark.parametrize("dp_size, zero_stage", [(1, 1), (2, 0), (2, 1), (4, 1)])
def test_bf16_weights_are_the_cast_of_fp32_master_weights(dp_size, zero_stage):
    expected, _ = reference(dp_size, dtype=torch.float32)
    for history, _, num_bytes, optimizer in train(1, dp_size, zero_stage, policy="bf16"):
        masters = {}
        for bucket in optimizer.buckets:
            assert bucket.master.dtype is torch.float32 and bucket.weights.dtype is torch.bfloat16
            assert torch.equal(bucket.master.bfloat16(), bucket.owned_weights)
            masters |= _owned_parts(bucket)
        assert num_bytes == sum(3 * bucket.master.nbytes for bucket in optimizer.buckets)
        for name, (start, values) in masters.items():
            whole = expected[-1][name].reshape(-1)[start : start + len(values)]
            # fp32 sums and a fused formula: an ulp or two of weights about 1.
            torch.testing.assert_close(values, whole, rtol=1e-6, atol=1e-6)
        for name, weight in history[-1].items():  # gathered: the parts of the others too
            torch.testing.assert_close(weight.float(), expected[-1][name], rtol=2**-8, atol=1e-6)


def _owned_parts(bucket):
    """name -> (first flat index, master values) of the parameters that this rank owns a part of."""
    parts = {}
    for place in bucket.plan.places:
        start = max(place.offset, bucket.owned.start)
        stop = min(place.offset + place.length, bucket.owned.stop)
        if start < stop:
            values = bucket.master[start - bucket.owned.start : stop - bucket.owned.start]
            parts[place.name] = (start - place.offset, values)
    return parts


def test_small_updates_are_not_lost_in_bf16():
    """Ten steps of 1e-4 on a weight of 1, whose bf16 neighbours are 4e-3 below: the master weights keep them."""

    def body(rank, world):
        stage, optimizer, _ = build(rank, world, 1, 1, 1, policy="bf16")
        for _ in range(10):
            optimizer.begin_iteration()
            for parameter in parameters_of(stage):
                parameter.grad_buffer().fill_(1.0)
            optimizer.finish_reduction()
            optimizer.update(learning_rate=1e-4, grad_scale=1.0)
        (bucket,) = (b for b in optimizer.buckets if b.plan.places[0].name == "norm")
        return bucket.master[:12].clone(), bucket.weights[:12].clone()

    ((master, weights),) = run_threads(1, body)
    torch.testing.assert_close(master, torch.full((12,), 0.999), rtol=0, atol=1e-6)
    assert torch.equal(weights, torch.ones(12).bfloat16())
