"""The layers against plain torch on one rank, and against one rank on several (threads)."""

from collections import Counter

import pytest
import torch
from plain_llama import plain_loss

from models.make import make_decoder
from parallel3d.comm.tensor_parallel import TensorParallel, solo_region
from parallel3d.config.schema import ModelConfig
from parallel3d.layers.init import initial_value
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.parameter import ShardedParameter, WeightGrads, parameters_of, run_kept
from parallel3d.layers.placement import Placement
from parallel3d.precision.policy import POLICIES
from parallel3d.testing.threads import run_threads

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


def build(config, tp, policy="fp64"):
    on = Placement(tp=tp, policy=POLICIES[policy])
    stage = make_decoder(config, range(config.num_hidden_layers), num_positions=SEQ, on=on)
    for p in parameters_of(stage):
        value = initial_value(p.sharding, seed=7, tp_rank=tp.group.rank, tp_size=tp.group.size)
        if p.sharding.is_norm_or_bias:
            value += 0.1 * torch.arange(value.numel()) / value.numel()
        p.data.copy_(value)
    return stage


def solo(policy, device="cpu"):
    return Placement(tp=solo_region(), policy=POLICIES[policy], device=device)


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
        for run in sharding.runs(rank, len(parts)):
            result.narrow(sharding.dim, run.global_start, run.length).copy_(
                part.narrow(sharding.dim, run.local_start, run.length)
            )
    return result


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_one_rank_equals_plain_torch(kv_heads):
    config = model_config(num_key_value_heads=kv_heads)
    loss, grads = run_stage(config, solo_region(), micro_batch())
    stage = build(config, solo_region())
    weights = {p.sharding.name: p.detach().clone().requires_grad_() for p in parameters_of(stage)}
    expected = plain_loss(config, weights, *(ids.view(BATCH, SEQ) for ids in tokens(config.vocab_size)))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for name, (_, grad) in grads.items():
        assert relative(grad, weights[name].grad) < 1e-11, name


@pytest.mark.parametrize("kv_heads,vocab", [(4, 50), (4, 49), (4, 5)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_tensor_parallel_equals_one_rank(size, sequence_parallel, kv_heads, vocab, drop):
    config = model_config(num_key_value_heads=kv_heads, vocab_size=vocab, hidden_dropout=drop)
    loss, grads = run_stage(config, solo_region(), micro_batch())

    def body(rank, world):
        group = world.make_group(rank)("tp", tuple(range(size)))
        return run_stage(config, TensorParallel(group=group, sequence_parallel=sequence_parallel), micro_batch())

    results = run_threads(size, body)
    for name in grads:
        shardings, parts = zip(*(r[1][name] for r in results))
        assert relative(whole(shardings, parts), grads[name][1]) < 1e-11, name
    assert all(r[0] == pytest.approx(loss, rel=1e-12) for r in results)


def backward_twice(config, tp, split, policy="fp32"):
    """Main gradients after two micro-batches, and after each half how often every parameter said it had one."""
    stage = build(config, tp, policy)
    parameters = parameters_of(stage)
    counts, after, weight_grads = Counter(), [], WeightGrads()
    for p in parameters:
        p.weight_grads = weight_grads
        p.on_grad = lambda name=p.sharding.name: counts.update([name])
    inputs, targets = tokens(config.vocab_size)
    for slots in ((4, 9), (2, 3)):
        loss = stage(inputs, micro_batch(slots=slots), targets)
        if split:
            with weight_grads.kept() as work:
                loss.backward()
            after.append(dict(counts))
            run_kept(work)
        else:
            loss.backward()
        after.append(dict(counts))
    return {p.sharding.name: p.main_grad for p in parameters}, after


@pytest.mark.parametrize("size,sequence_parallel", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_split_backward_is_bitwise_the_whole_one(size, sequence_parallel, policy):
    config = model_config(hidden_size=64, intermediate_size=160, hidden_dropout=0.2)

    def body(rank, world):
        group = world.make_group(rank)("tp", tuple(range(size)))
        tp = TensorParallel(group=group, sequence_parallel=sequence_parallel)
        return [backward_twice(config, tp, split, policy) for split in (False, True)]

    for (whole_grads, _), (split_grads, counts) in run_threads(size, body):
        assert all(grad.any() for grad in whole_grads.values())
        for name, grad in whole_grads.items():
            assert torch.equal(split_grads[name], grad), name
        linear = {name for name in whole_grads if "norm" not in name and name.startswith("layers")}
        others = set(whole_grads) - linear
        assert len(linear) == 8 and len(others) == 7
        assert counts[0] == dict.fromkeys(others, 1)
        assert counts[1] == dict.fromkeys(whole_grads, 1)
        assert counts[2] == dict.fromkeys(others, 2) | dict.fromkeys(linear, 1)
        assert counts[3] == dict.fromkeys(whole_grads, 2)


def test_forgetting_the_sum_of_norm_gradients_is_seen():
    config = model_config()
    _, grads = run_stage(config, solo_region(), micro_batch())

    def body(rank, world):
        tp = TensorParallel(group=world.make_group(rank)("tp", (0, 1)), sequence_parallel=True)
        stage = build(config, tp)
        inputs, targets = tokens(config.vocab_size)
        stage(inputs, micro_batch(), targets).backward()
        return {p.sharding.name: p.main_grad for p in parameters_of(stage) if p.sharding.partial_grad}

    for partial in run_threads(2, body):
        assert set(partial) == {n for n in grads if "norm" in n}
        for name, grad in partial.items():
            assert relative(grad, grads[name][1]) > 0.1, name


@pytest.mark.parametrize("size", [2, 4])
def test_initial_weights_are_bitwise_those_of_one_rank(size):
    config = model_config(vocab_size=49, initializer_depth_scaling="layer_index")
    one = {p.sharding.name: p.detach() for p in parameters_of(build(config, solo_region(), "fp32"))}

    def body(rank, world):
        tp = TensorParallel(group=world.make_group(rank)("tp", tuple(range(size))))
        return {p.sharding.name: (p.sharding, p.detach()) for p in parameters_of(build(config, tp, "fp32"))}

    results = run_threads(size, body)
    for name, value in one.items():
        shardings, parts = zip(*(r[name] for r in results))
        assert torch.equal(whole(shardings, parts), value), name


def test_dropout_masks_depend_on_nothing_but_their_key():
    config = model_config(hidden_dropout=0.3)
    same, _ = run_stage(config, solo_region(), micro_batch())
    assert same == run_stage(config, solo_region(), micro_batch())[0]
    assert same != run_stage(config, solo_region(), micro_batch(iteration=4))[0]
    assert same != run_stage(config, solo_region(), micro_batch(slots=(4, 8)))[0]


@pytest.mark.parametrize("scaling,factor", [("none", 1.0), ("layer_index", 24**-0.5), ("num_layers", 24**-0.5)])
def test_initial_std_of_the_last_layer(scaling, factor):
    """HLAT's depth scaling; the last layer of 12 has the same factor in both forms. 2 %: 5 sd of 500,000 numbers."""
    config = model_config(
        hidden_size=768, intermediate_size=652, num_hidden_layers=12, initializer_depth_scaling=scaling
    )
    stage = make_decoder(config, range(11, 12), num_positions=SEQ, on=solo("fp32"))
    down: ShardedParameter = stage.layers[0].mlp.down.weight
    value = initial_value(down.sharding, seed=1, tp_rank=0, tp_size=1)
    assert value.std().item() == pytest.approx(0.2 * factor, rel=0.02)
    assert value.mean().abs().item() < 0.2 * factor * 5 / value.numel() ** 0.5


def test_rotary_table_is_shared_by_all_layers_and_stages_split_the_model():
    config = model_config()
    inputs, targets = tokens(config.vocab_size)
    full = build(config, solo_region())
    parts = [make_decoder(config, r, num_positions=SEQ, on=solo("fp64")) for r in (range(0, 1), range(1, 2))]
    values = {p.sharding.name: p.data for p in parameters_of(full)}
    for part in parts:
        for p in parameters_of(part):
            p.data.copy_(values.pop(p.sharding.name))
    assert not values
    hidden = parts[0](inputs, micro_batch())
    assert parts[1](hidden, micro_batch(), targets).item() == full(inputs, micro_batch(), targets).item()
    assert not [name for name, _ in full.named_buffers()]
    assert full.layers[0].table is full.layers[1].table and full.layers[0].table.cos.shape == (SEQ, 4)


@pytest.mark.parametrize(
    "sizes,count",
    [
        (dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32), 6_738_415_616),
        (
            dict(
                hidden_size=8192,
                intermediate_size=28672,
                num_hidden_layers=80,
                num_attention_heads=64,
                num_key_value_heads=8,
            ),
            68_976_648_192,
        ),
    ],
)
def test_parameter_counts_of_hlat(sizes, count):
    config = ModelConfig(**{"vocab_size": 32000, "num_key_value_heads": 32, **sizes})
    layers = range(config.num_hidden_layers)
    stage = make_decoder(config, layers, num_positions=8, on=solo("bf16", "meta"))
    assert sum(p.numel() for p in stage.parameters()) == count


def test_bf16_keeps_the_loss_near_fp64():
    """bf16 has 8 bits of mantissa; the loss is a sum of 24 tokens computed in fp32 from bf16 activations."""
    config = model_config()
    wide, _ = run_stage(config, solo_region(), micro_batch())
    narrow, grads = run_stage(config, solo_region(), micro_batch(), "bf16")
    assert narrow == pytest.approx(wide, rel=2e-2)
    assert all(grad.dtype == torch.float32 for _, grad in grads.values())
