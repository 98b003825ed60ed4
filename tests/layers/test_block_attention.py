"""Attention over blocks of queries equals torch's SDPA, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel3d.compiled_loops import loop_library
from parallel3d.kernels import c_loops, torch_attention
from parallel3d.kernels.c_loops import has_attention_loop, has_tiles
from parallel3d.kernels.layer_kernels import TORCH_KERNELS, layer_kernels
from parallel3d.layers import attention
from parallel3d.layers.attention import attend, attend_per_document
from parallel3d.layers.gemm import Gemm
from parallel3d.layers.init import initial_value
from parallel3d.layers.parameter import parameters_of
from parallel3d.layers.placement import LayerContext
from parallel3d.models.make import make_decoder
from parallel3d.parallel.tensor_parallel import solo_region
from parallel3d.precision.policy import POLICIES
from tests.support.cells import Cell, run_cell
from tests.support.tiny_stages import SEQ, micro_batch, model_config, relative, tokens

FP32 = torch.float32
CAPPED = dict(architecture="gemma2", sliding_window=5, initializer_range=0.5, attn_logit_softcapping=1.0)


def results(q, k, v, grad, form, kernels=TORCH_KERNELS.attention):
    q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
    mixed = attend(q, k, v, form=form, kernels=kernels)
    return mixed.detach(), *torch.autograd.grad(mixed, (q, k, v), grad)


def inputs(length, num_heads, num_kv_heads, dtype, seed=0, size=16):
    generator = torch.Generator().manual_seed(seed)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    q, k, v, grad = (torch.randn(2, length, n, size, dtype=torch.float64, generator=generator) for n in heads)
    return [each.to(dtype) for each in (2 * q, k, v, grad)]  # some probabilities are near 1


def distance(found, expected):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected)]


@pytest.mark.parametrize("length", [2, 63, 64, 130, 200])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (4, 2), (6, 1)])
def test_it_is_sdpa(length, num_heads, num_kv_heads):
    tensors = inputs(length, num_heads, num_kv_heads, torch.float64)
    assert max(distance(results(*tensors, "blocks"), results(*tensors, "sdpa"))) < 1e-14 * length**0.5 + 1e-15


@pytest.mark.parametrize("window", [None, 1, 5, 64, 70, 200])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (6, 2)])
def test_capped_scores_in_a_window_are_those_of_whole_matrices(num_heads, num_kv_heads, window):
    """200 tokens are several blocks of queries, most of which see only some keys."""
    tensors = inputs(200, num_heads, num_kv_heads, torch.float64)
    q, k, v, grad = (each.detach().requires_grad_() for each in tensors)
    keys, values = (each.repeat_interleave(num_heads // num_kv_heads, 2) for each in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[-1] ** -0.5
    distances = torch.arange(200).unsqueeze(1) - torch.arange(200)
    sees = (distances >= 0) & (distances < (window or 200))
    probabilities = (1.5 * (scores / 1.5).tanh()).masked_fill(~sees, float("-inf")).softmax(-1)
    mixed = torch.einsum("bhqk,bkhd->bqhd", probabilities, values)
    expected = mixed.detach(), *torch.autograd.grad(mixed, (q, k, v), grad)
    mixed = attend(q, k, v, window, 1.5)
    assert max(distance((mixed.detach(), *torch.autograd.grad(mixed, (q, k, v), grad)), expected)) < 1e-14 * 200**0.5


def test_scores_of_each_document_are_capped():
    q, k, v, _ = inputs(200, 4, 2, torch.float64)
    found = attend_per_document((130, 270), q, k, v, 7, 1.5)
    parts = (each.flatten(0, 1).unsqueeze(0).split((130, 270), dim=1) for each in (q, k, v))
    assert torch.equal(found, torch.cat([attend(*part, 7, 1.5) for part in zip(*parts)], dim=1))


@pytest.mark.parametrize("documents", [False, True])
def test_blocks_of_gemma_2_cap_scores_with_and_without_documents(documents):
    cell = Cell(name="capped", changes=dict(model=CAPPED, data=dict(document_mask=documents)))
    other = Cell(name="open", changes=dict(cell.changes, model=dict(CAPPED, attn_logit_softcapping=None)))
    assert run_cell(cell).losses != pytest.approx(run_cell(other).losses, rel=1e-6)


def test_heads_in_parts_are_the_same(monkeypatch):
    tensors = inputs(130, 4, 2, torch.float64)
    whole = results(*tensors, "blocks")
    monkeypatch.setattr("parallel3d.kernels.torch_attention.SCORES_AT_ONCE", 1)
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


needs_loops = pytest.mark.skipif(not has_attention_loop(FP32), reason="no C compiler, or neither AVX-512 nor AVX2")


@needs_loops
@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("length, size", [(17, 16), (63, 48), (64, 16), (130, 64), (200, 32), (320, 96)])
@pytest.mark.parametrize("dtype, factor", [(FP32, 1.3), (torch.bfloat16, 1.6), (torch.float16, 1.6)], ids=str)
def test_loops_in_c_are_as_exact(dtype, factor, length, size, num_heads, num_kv_heads):
    """fp16, like other formats and sizes that the loops don't know, takes torch's form."""
    tensors, kernels = inputs(length, num_heads, num_kv_heads, dtype, size=size), layer_kernels("c").attention
    assert_as_exact_as_sdpa(tensors, factor, kernels)
    by_torch = results(*tensors, "blocks")
    assert max(distance(results(*tensors, "blocks", kernels), by_torch)) < (4e-3 if dtype != FP32 else 1e-6)


@needs_loops
@pytest.mark.parametrize("length, size", [(63, 48), (130, 64)])
@pytest.mark.parametrize("dtype, factor", [(FP32, 1.3), (torch.bfloat16, 1.6)], ids=str)
def test_loops_of_avx2_are_as_exact(monkeypatch, dtype, factor, length, size):
    library = loop_library(Path(c_loops.__file__).with_name("attention_loops.c"), "-fopenmp", "-mno-avx512f")
    assert hasattr(library, "attention") and not hasattr(library, "attention_multiplies_bf16")
    monkeypatch.setattr(c_loops, "_library", lambda source: library)
    monkeypatch.setattr("parallel3d.kernels.c_attention.has_tiles", lambda: False)
    tensors, kernels = inputs(length, 4, 2, dtype, size=size), layer_kernels("c").attention
    assert_as_exact_as_sdpa(tensors, factor, kernels)
    tensors[1][:, -1] = float("nan")
    mixed = results(*tensors, "blocks", kernels)[0]
    assert mixed[:, :-1].isfinite().all() and mixed[:, -1].isnan().all(), "of a key, for the queries that see it"


@needs_loops
def test_without_instructions_for_bf16_loops_in_c_widen_it(monkeypatch):
    tensors, kernels = inputs(130, 4, 2, torch.bfloat16, size=32), layer_kernels("c").attention
    wide = results(*(each.float() for each in tensors), "blocks", kernels)
    monkeypatch.setattr("parallel3d.kernels.c_attention.has_attention_loop", lambda dtype: dtype is FP32)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(results(*tensors, "blocks", kernels), wide))


@pytest.mark.skipif(not has_tiles(), reason="no AMX")
@pytest.mark.parametrize("length, size, num_kv_heads", [(64, 32, 4), (130, 64, 2), (320, 96, 1)])
def test_tiles_give_what_vectors_give(monkeypatch, length, size, num_kv_heads):
    """And leave the processor's tiles to torch's products as they were."""
    tensors, kernels = inputs(length, 4, num_kv_heads, torch.bfloat16, size=size), layer_kernels("c").attention
    factor = torch.randn(96, 96, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    product = factor @ factor
    by_tiles = results(*tensors, "blocks", kernels)
    assert torch.equal(factor @ factor, product)
    monkeypatch.setattr("parallel3d.kernels.c_attention.has_tiles", lambda: False)
    by_vectors = results(*tensors, "blocks", kernels)
    assert max(distance(by_tiles, [each.double() for each in by_vectors])) < 1e-3
    assert not all(torch.equal(*pair) for pair in zip(by_tiles, by_vectors)), "tiles add up in another order"


@needs_loops
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32], ids=str)
def test_bits_depend_on_no_threads_and_on_no_other_unit(dtype):
    """And large scores, of keys that a query does not see, don't matter."""
    q, k, v, grad = inputs(450, 16, 8, dtype, size=64)
    k[:, 449] = 1e4
    kernels, num_threads = layer_kernels("c").attention, torch.get_num_threads()
    found = []
    for threads in (1, 3, 3):
        torch.set_num_threads(threads)
        try:
            found.append(results(q, k, v, grad, "blocks", kernels))
        finally:
            torch.set_num_threads(num_threads)
    alone = results(q[1:], k[1:], v[1:], grad[1:], "blocks", kernels)
    for several in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(several, found[0]))
    assert all(torch.equal(each[1:], one) for each, one in zip(found[0], alone))
    k[:, 449] = 0
    others = results(q, k, v, grad, "blocks", kernels)
    assert torch.equal(others[0][:, :449], found[0][0][:, :449])


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


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 1), ("full", 2)])
@pytest.mark.parametrize("changes", [{}, dict(architecture="mistral", sliding_window=3)], ids=["whole", "window"])
def test_selective_recomputation_keeps_the_results_of_blocks(recompute, times, changes, monkeypatch):
    """Each layer's attention is computed once for both of its runs, and no bit depends on it."""
    monkeypatch.setattr(attention, "MIN_BLOCK_WINDOW", 1)
    calls, compute = [], torch_attention.attention

    def counted(*args, **options):
        calls.append(args)
        return compute(*args, **options)

    monkeypatch.setattr(torch_attention, "attention", counted)
    kernels = replace(TORCH_KERNELS, attention=replace(TORCH_KERNELS.attention, forward=counted))
    config = model_config(num_key_value_heads=2, **changes)
    found = []
    for mode in ("none", recompute):
        calls.clear()
        context = LayerContext(
            tp=solo_region(), policy=POLICIES["fp32"], gemm=Gemm(attention="blocks"), kernels=kernels
        )
        stage = make_decoder(config, range(2), num_positions=SEQ, context=context, recompute=mode)
        for p in parameters_of(stage):
            p.data.copy_(initial_value(p.sharding, seed=7, tp=solo_region().shard))
        inputs, targets = tokens(config.vocab_size)
        stage(inputs, micro_batch(), targets).backward()
        found.append({p.sharding.name: p.main_grad for p in parameters_of(stage)})
    assert len(calls) == 2 * times
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []
