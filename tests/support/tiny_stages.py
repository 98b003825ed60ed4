"""Tiny stages on one rank or several (threads), their losses and gradients."""

from collections import Counter
from functools import partial

import pytest
import torch

from parallel3d.config.schema import ModelConfig
from parallel3d.inprocess.world import run_threads
from parallel3d.kernels.layer_kernels import TORCH_KERNELS
from parallel3d.layers.gradient_sink import GradientSink, WeightGradStore, run_deferred
from parallel3d.layers.init import initial_value
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.parameter import parameters_of
from parallel3d.layers.placement import LayerContext
from parallel3d.models.make import make_decoder
from parallel3d.parallel.sharding import TpShard
from parallel3d.parallel.tensor_parallel import TensorParallel, solo_region
from parallel3d.precision.policy import POLICIES

SEQ, BATCH = 12, 2


def model_config(**changes):
    sizes = dict(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.2,
    )
    return ModelConfig(**{**sizes, **changes})


def build(config, tp, policy="fp64", recompute="none", device="cpu", kernels=TORCH_KERNELS):
    context = LayerContext(tp=tp, policy=POLICIES[policy], device=device, kernels=kernels)
    stage = make_decoder(
        config, range(config.num_hidden_layers), num_positions=SEQ, context=context, recompute=recompute
    )
    for p in parameters_of(stage):
        value = initial_value(p.sharding, seed=7, tp=tp.shard)
        if p.sharding.is_norm_or_bias:
            ramp = 0.1 * torch.arange(p.sharding.num_elements) / p.sharding.num_elements
            for run in p.sharding.runs(tp.shard):
                value.narrow(0, run.local_start, run.length).add_(ramp.narrow(0, run.global_start, run.length))
        p.data.copy_(value)
    return stage


def solo(policy, device="cpu"):
    return LayerContext(tp=solo_region(), policy=POLICIES[policy], device=device)


def micro_batch(**changes):
    return MicroBatch(**{**dict(seed=7, iteration=3, slots=(4, 9), sequence_length=SEQ), **changes})


def tokens(vocab):
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(vocab, (BATCH * SEQ, 2), generator=generator)
    return drawn[:, 0].contiguous(), drawn[:, 1].contiguous()


def run_stage(config, tp, batch, policy="fp64"):
    """Loss, {name: gradient} of this rank, with the sums over the group that the optimizer does elsewhere."""
    stage = build(config, tp, policy)
    inputs, targets = tokens(config.vocab_size)
    loss = stage(inputs, batch, targets)
    loss.backward()
    for p in parameters_of(stage):
        if p.sharding.partial_grad:
            tp.group.all_reduce(p.main_grad)
    return loss.item(), {p.sharding.name: (p.sharding, p.main_grad) for p in parameters_of(stage)}


def whole(shardings, parts):
    """The global tensor from the ranks' parts."""
    sharding = shardings[0]
    if sharding.dim is None:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    result = torch.full(sharding.shape, float("nan"), dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        for run in sharding.runs(TpShard(rank=rank, size=len(parts))):
            result.narrow(sharding.dim, run.global_start, run.length).copy_(
                part.narrow(sharding.dim, run.local_start, run.length)
            )
    return result


def assert_two_stages_split(config):
    """A stage of each layer, with the same parameters: the same loss. The whole stage comes back."""
    inputs, targets = tokens(config.vocab_size)
    full = build(config, solo_region())
    parts = [make_decoder(config, r, num_positions=SEQ, context=solo("fp64")) for r in (range(0, 1), range(1, 2))]
    values = {p.sharding.name: p.data for p in parameters_of(full)}
    for part in parts:
        for p in parameters_of(part):
            p.data.copy_(values.pop(p.sharding.name))
    assert not values
    hidden = parts[0](inputs, micro_batch())
    assert parts[1](hidden, micro_batch(), targets).item() == full(inputs, micro_batch(), targets).item()
    return full


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def assert_equals_plain_loss(config, plain_loss):
    """Compares loss and gradients on one rank with `plain_loss(config, weights, tokens, targets)`, the model in plain
    torch; returns the names of its weights."""
    loss, grads = run_stage(config, solo_region(), micro_batch())
    stage = build(config, solo_region())
    weights = {p.sharding.name: p.detach().clone().requires_grad_() for p in parameters_of(stage)}
    expected = plain_loss(config, weights, *(ids.view(BATCH, SEQ) for ids in tokens(config.vocab_size)))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for name, (_, grad) in grads.items():
        assert relative(grad, weights[name].grad) < 1e-11, name
    return list(weights)


def backward_twice(config, tp, split, policy="fp32", recompute="none", **options):
    """Main gradients after two micro-batches, and after each half how often every parameter said it had one."""
    stage = build(config, tp, policy, recompute, **options)
    parameters = parameters_of(stage)
    counts, after, weight_grads = Counter(), [], WeightGradStore()
    for p in parameters:
        on_added = partial(counts.update, [p.sharding.name])
        p.attach(GradientSink.with_own_buffer(p, weight_grads=weight_grads, on_added=on_added))
    inputs, targets = (ids.to(parameters[0].device) for ids in tokens(config.vocab_size))
    for slots in ((4, 9), (2, 3)):
        loss = stage(inputs, micro_batch(slots=slots), targets)
        if split:
            with weight_grads.deferred() as work:
                loss.backward()
            after.append(dict(counts))
            run_deferred(work)
        else:
            loss.backward()
        after.append(dict(counts))
    return {p.sharding.name: p.main_grad for p in parameters}, after


def differences_of_tensor_parallel(config, size, sequence_parallel, batch=None):
    """By gradient (and "loss"): how far `size` ranks are from one, as a share of the largest element."""
    batch = batch or micro_batch()
    loss, grads = run_stage(config, solo_region(), batch)

    def body(rank, world):
        group = world.make_group(rank)("tp", tuple(range(size)))
        return run_stage(config, TensorParallel(group=group, sequence_parallel=sequence_parallel), batch)

    results = run_threads(size, body)
    differences = {"loss": max(abs(result[0] / loss - 1) for result in results)}
    for name in grads:
        shardings, parts = zip(*(result[1][name] for result in results))
        differences[name] = relative(whole(shardings, parts), grads[name][1])
    return differences
