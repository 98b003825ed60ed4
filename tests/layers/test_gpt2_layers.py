"""GPT-2's layers against plain torch on one rank, and against one rank on several (threads)."""

import pytest
import torch

from parallel3d.config.derived import num_parameters
from parallel3d.config.schema import ModelConfig
from parallel3d.inprocess.world import run_threads
from parallel3d.layers.init import initial_value
from parallel3d.layers.parameter import parameters_of
from parallel3d.models.make import make_decoder
from parallel3d.parallel.sharding import UNSHARDED
from parallel3d.parallel.tensor_parallel import TensorParallel, solo_region
from tests.support.plain_gpt2 import plain_loss
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
)


def gpt2_config(**changes):
    return model_config(**{"architecture": "gpt2", "max_position_embeddings": SEQ + 3, **changes})


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False}, {"activation_function": "gelu"}], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_one_rank_equals_plain_torch(changes, kv_heads):
    config = gpt2_config(num_key_value_heads=kv_heads, **changes)
    names = assert_equals_plain_loss(config, plain_loss)
    num_biases = 5 if config.qkv_bias is False else 6  # of a layer
    assert len([name for name in names if name.endswith("bias")]) == 1 + 2 * num_biases


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_tensor_parallel_equals_one_rank(size, sequence_parallel, drop):
    """4 ranks have 6 of the 24 tokens of two sequences each: half a sequence; 2 ranks have a whole one."""
    config = gpt2_config(vocab_size=49, hidden_dropout=drop)
    differences = differences_of_tensor_parallel(config, size, sequence_parallel)
    assert max(differences.values()) < 1e-11, differences


def test_forgetting_a_sum_of_partial_gradients_is_seen():
    """Norms, positions and the biases that are added after a row-parallel product: 24 tokens on 2 ranks."""
    config = gpt2_config()
    _, grads = run_stage(config, solo_region(), micro_batch())

    def body(rank, world):
        tp = TensorParallel(group=world.make_group(rank)("tp", (0, 1)), sequence_parallel=True)
        stage = build(config, tp)
        inputs, targets = tokens(config.vocab_size)
        stage(inputs, micro_batch(), targets).backward()
        return {p.sharding.name: p.main_grad for p in parameters_of(stage) if p.sharding.partial_grad}

    whole_on_each = {"output.bias", "down.bias", "norm.weight", "norm.bias", "positions.weight"}
    for partial in run_threads(2, body):
        assert set(partial) == {name for name in grads if name.endswith(tuple(whole_on_each))}
        for name, grad in partial.items():
            assert relative(grad, grads[name][1]) > 0.1, name


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_split_backward_is_bitwise_the_whole_one(policy):
    """It defers only the products for weights: biases, norms and positions get their gradients at once."""
    config = gpt2_config(hidden_size=64, intermediate_size=160, hidden_dropout=0.2)
    whole_grads, _ = backward_twice(config, solo_region(), False, policy)
    split_grads, counts = backward_twice(config, solo_region(), True, policy)
    for name, grad in whole_grads.items():
        assert torch.equal(split_grads[name], grad), name
    products = {
        name for name in whole_grads if name.endswith(("qkv.weight", "output.weight", "up.weight", "down.weight"))
    }
    assert len(products) == 8
    assert counts[0] == dict.fromkeys(set(whole_grads) - products, 1)
    assert counts[1] == dict.fromkeys(whole_grads, 1)


def test_initial_values():
    stage = build_initial(gpt2_config())
    for name, value in stage.items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            assert value.std() == pytest.approx(0.2, rel=0.1), name


def build_initial(config):
    stage = make_decoder(config, range(config.num_hidden_layers), num_positions=SEQ, context=solo("fp32"))
    shardings = [p.sharding for p in parameters_of(stage)]
    return {sharding.name: initial_value(sharding, seed=7, tp=UNSHARDED) for sharding in shardings}


def test_stages_split_the_model():
    """Only the first stage has positions."""
    assert_two_stages_split(gpt2_config())


def test_positions_are_as_many_as_asked_for():
    for given, expected in ((20, 20), (None, SEQ)):
        stage = make_decoder(
            gpt2_config(max_position_embeddings=given), range(1), num_positions=SEQ, context=solo("fp32", "meta")
        )
        assert stage.positions.weight.shape == (expected, 32)


@pytest.mark.parametrize(
    "qkv_bias,tied,count",
    [(False, False, 163_009_536), (True, False, 163_037_184), (False, True, 124_412_160), (True, True, 124_439_808)],
)
def test_parameter_counts_of_gpt2_small(qkv_bias, tied, count):
    """163,009,536 is the published count of the untied model, 124,412,160 of the tied one; the biases of 12 x 3
    projections of 768 are 27,648."""
    config = ModelConfig(
        architecture="gpt2",
        vocab_size=50257,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=1024,
        qkv_bias=qkv_bias,
        tie_word_embeddings=tied,
    )
    stage = make_decoder(config, range(12), num_positions=1024, context=solo("bf16", "meta"))
    assert sum(p.numel() for p in stage.parameters()) == num_parameters(config) == count


def test_bf16_keeps_the_loss_near_fp64():
    """bf16 has 8 bits of mantissa; the loss is a sum of 24 tokens computed in fp32 from bf16 activations."""
    wide, _ = run_stage(gpt2_config(), solo_region(), micro_batch())
    narrow, grads = run_stage(gpt2_config(), solo_region(), micro_batch(), "bf16")
    assert narrow == pytest.approx(wide, rel=2e-2)
    assert all(grad.dtype == torch.float32 for _, grad in grads.values())
