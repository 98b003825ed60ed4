"""The layers against plain torch on one rank, and against one rank on several (threads)."""

import pytest
import torch

from parallel3d.config.schema import ModelConfig
from parallel3d.inprocess.world import run_threads
from parallel3d.layers.init import initial_value
from parallel3d.layers.parameter import ShardedParameter, parameters_of
from parallel3d.models.make import make_decoder
from parallel3d.parallel.sharding import UNSHARDED
from parallel3d.parallel.tensor_parallel import TensorParallel, solo_region
from tests.support.plain_llama import plain_loss
from tests.support.tiny_stages import (
    SEQ,
    assert_equals_plain_loss,
    assert_two_stages_split,
    backward_twice,
    build,
    differences_of_tensor_parallel,
    micro_batch,
    model_config,
    relative,
    run_stage,
    solo,
    tokens,
    whole,
)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_one_rank_equals_plain_torch(kv_heads):
    assert_equals_plain_loss(model_config(num_key_value_heads=kv_heads), plain_loss)


@pytest.mark.pairwise
@pytest.mark.parametrize("kv_heads,vocab", [(4, 50), (4, 49), (4, 5)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_tensor_parallel_equals_one_rank(size, sequence_parallel, kv_heads, vocab, drop):
    config = model_config(num_key_value_heads=kv_heads, vocab_size=vocab, hidden_dropout=drop)
    differences = differences_of_tensor_parallel(config, size, sequence_parallel)
    assert max(differences.values()) < 1e-11, differences


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
    stage = make_decoder(config, range(11, 12), num_positions=SEQ, context=solo("fp32"))
    down: ShardedParameter = stage.layers[0].mlp.down.weight
    value = initial_value(down.sharding, seed=1, tp=UNSHARDED)
    assert value.std().item() == pytest.approx(0.2 * factor, rel=0.02)
    assert value.mean().abs().item() < 0.2 * factor * 5 / value.numel() ** 0.5


def test_rotary_table_is_shared_by_all_layers_and_stages_split_the_model():
    full = assert_two_stages_split(model_config())
    assert not [name for name, _ in full.named_buffers()]
    first, second = (layer.attention.table for layer in full.layers)
    assert first is second and first.cos.shape == (SEQ, 4)


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
    stage = make_decoder(config, layers, num_positions=8, context=solo("bf16", "meta"))
    assert sum(p.numel() for p in stage.parameters()) == count


def test_bf16_keeps_the_loss_near_fp64():
    """bf16 has 8 bits of mantissa; the loss is a sum of 24 tokens computed in fp32 from bf16 activations."""
    config = model_config()
    wide, _ = run_stage(config, solo_region(), micro_batch())
    narrow, grads = run_stage(config, solo_region(), micro_batch(), "bf16")
    assert narrow == pytest.approx(wide, rel=2e-2)
    assert all(grad.dtype == torch.float32 for _, grad in grads.values())
