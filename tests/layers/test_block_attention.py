"""Attention over blocks of queries equals torch's SDPA, forward and backward."""

from __future__ import annotations

import pytest
import torch

from models.make import make_decoder
from parallel3d.kernels import c_attention
from parallel3d.kernels.c_loops import has_c_loops
from parallel3d.kernels.layer_kernels import TORCH_KERNELS, layer_kernels
from parallel3d.layers.attention import attend
from parallel3d.layers.gemm import Gemm
from parallel3d.layers.init import initial_value
from parallel3d.layers.parameter import parameters_of
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.tensor_parallel import solo_region
from parallel3d.precision.policy import POLICIES
from tests.support.tiny_stages import SEQ, micro_batch, model_config, relative, tokens

FP32 = torch.float32


def results(q, k, v, grad, form, kernels=TORCH_KERNELS.attention):
    q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
    mixed = attend(q, k, v, form=form, kernels=kernels)
    return mixed.detach(), *torch.autograd.grad(mixed, (q, k, v), grad)


def inputs(length, num_heads, num_kv_heads, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    q, k, v, grad = (torch.randn(2, length, n, 16, dtype=torch.float64, generator=generator) for n in heads)
    return [each.to(dtype) for each in (2 * q, k, v, grad)]  # some probabilities are near 1


def distance(found, expected):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected)]


@pytest.mark.parametrize("length", [2, 63, 64, 130, 200])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (4, 2), (6, 1)])
def test_it_is_sdpa(length, num_heads, num_kv_heads):
    tensors = inputs(length, num_heads, num_kv_heads, torch.float64)
    assert max(distance(results(*tensors, "blocks"), results(*tensors, "sdpa"))) < 1e-14 * length**0.5 + 1e-15


def test_heads_in_parts_are_the_same(monkeypatch):
    tensors = inputs(130, 4, 2, torch.float64)
    whole = results(*tensors, "blocks")
    monkeypatch.setattr("parallel3d.layers.block_attention.SCORES_AT_ONCE", 1)
    assert max(distance(results(*tensors, "blocks"), whole)) < 1e-14


@pytest.mark.parametrize("dtype, factor", [(torch.float32, 1.3), (torch.bfloat16, 1.6), (torch.float16, 1.6)])
def test_it_is_as_exact_as_sdpa(dtype, factor):
    """Against fp64 of the same rounded inputs; SDPA may divide by the sum after its product, blocks before it."""
    tensors = inputs(200, 4, 4, dtype)
    assert_as_exact_as_sdpa(tensors, factor, TORCH_KERNELS.attention)


def assert_as_exact_as_sdpa(tensors, factor, kernels):
    exact = results(*(each.double() for each in tensors), "sdpa")
    ours, theirs = (distance(results(*tensors, form, kernels), exact) for form in ("blocks", "sdpa"))
    assert all(a <= factor * b for a, b in zip(ours, theirs)), (ours, theirs)


@pytest.mark.skipif(not has_c_loops(), reason="no C compiler with OpenMP")
@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("length", [64, 200, 320])
@pytest.mark.parametrize("dtype, factor", [(torch.float32, 1.3), (torch.bfloat16, 1.6), (torch.float16, 1.6)])
def test_loops_in_c_are_as_exact(dtype, factor, length, num_heads, num_kv_heads, monkeypatch):
    """In bf16, lengths of whole tiles take the processor's products with results in fp32, if it has them."""
    tensors, kernels = inputs(length, num_heads, num_kv_heads, dtype), layer_kernels("c").attention
    assert_as_exact_as_sdpa(tensors, factor, kernels)
    with_its_products = results(*tensors, "blocks", kernels)
    monkeypatch.setattr(c_attention, "has_layer_loop", lambda name: False)
    widened = results(*tensors, "blocks", kernels)
    assert max(distance(with_its_products, [each.double() for each in widened])) < (1e-3 if dtype != FP32 else 1e-6)


@pytest.mark.skipif(not has_c_loops(), reason="no C compiler with OpenMP")
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32], ids=str)
def test_the_softmax_in_c(dtype):
    """Rows of three heads' queries 40 to 59 of 60 keys: scores of keys that a query does not see don't matter."""
    scores = 4 * torch.randn(2, 3 * 20, 60, generator=torch.Generator().manual_seed(1))
    scores[1, 7, 50:] = 1e4  # query 47 does not see them
    grad, c, exact = torch.randn_like(scores), layer_kernels("c").attention, TORCH_KERNELS.attention
    wide, _ = exact.softmax(scores.double(), 20, torch.float64)
    probabilities, rounded = c.softmax(scores.clone(), 20, dtype)
    assert rounded.dtype is dtype and torch.equal(probabilities == 0, wide == 0)
    torch.testing.assert_close(probabilities.double(), wide, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(rounded.float(), probabilities.to(dtype).float(), rtol=0, atol=0)
    expected = exact.softmax_grads(grad.double(), wide, torch.float64)
    found = c.softmax_grads(grad.clone(), probabilities, dtype)
    torch.testing.assert_close(found.double(), expected, rtol=4e-3 if dtype is not FP32 else 1e-4, atol=1e-6)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_models_gradients_are_those_of_sdpa(recompute):
    """Through the layers, and recomputed in the backward pass; in fp64, where only the order of sums differs."""
    found = {}
    for form in ("sdpa", "blocks"):
        context = LayerContext(tp=solo_region(), policy=POLICIES["fp64"], gemm=Gemm(attention=form))
        config = model_config(num_key_value_heads=2)
        stage = make_decoder(config, range(2), num_positions=SEQ, context=context, recompute=recompute)
        parameters = parameters_of(stage)
        for p in parameters:
            p.data.copy_(initial_value(p.sharding, seed=7, tp=solo_region().shard))
        inputs, targets = tokens(config.vocab_size)
        stage(inputs, micro_batch(), targets).backward()
        found[form] = {p.sharding.name: p.main_grad for p in parameters}
    for name, expected in found["sdpa"].items():
        assert relative(found["blocks"][name], expected) < 1e-12, name
    assert not all(torch.equal(found["blocks"][name], found["sdpa"][name]) for name in found["sdpa"]), "blocks are used"
