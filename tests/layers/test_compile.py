"""Compiled elementwise chains: the formulas are the layers', and so is what torch.compile makes of them."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from parallel3d.kernels import compiled_layer_kernels
from parallel3d.kernels.layer_kernels import layer_kernels
from parallel3d.layers.parameter import parameters_of
from parallel3d.parallel.tensor_parallel import solo_region
from parallel3d.rehearsal.kernel_counter import KernelCounter
from tests.support.tiny_stages import build, micro_batch, model_config, relative, tokens

# fp64: operations in another order. bf16: eager code rounds after every operation, a kernel once; 8 bits.
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 3e-2}


def gradients(policy, compiles, recompute="none"):
    config = model_config(hidden_dropout=0.2, num_key_value_heads=2)
    stage = build(config, solo_region(), policy, recompute, kernels=layer_kernels("torch", compiles=compiles))
    inputs, targets = tokens(config.vocab_size)
    loss = stage(inputs, micro_batch(), targets)
    loss.backward()
    return {p.sharding.name: p.main_grad for p in parameters_of(stage)} | {"loss": loss.detach()}


def assert_near(policy, recompute="none"):
    ours, theirs = gradients(policy, True, recompute), gradients(policy, False)
    far = {name: relative(ours[name], theirs[name]) for name in theirs}
    assert {name: distance for name, distance in far.items() if distance > TOLERANCE[policy]} == {}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("policy", TOLERANCE)
def test_the_formulas_are_the_layers(monkeypatch, policy, recompute):
    """Without a compiler: torch differentiates them."""
    made = []
    monkeypatch.setattr(
        compiled_layer_kernels, "_compiled", lambda function: made.append(function.__name__) or function
    )
    assert_near(policy, recompute)
    rotary = {"split_and_rotate_formula", "packed_grads_formula"}
    assert set(made) == {"rms_norm", "rms_norm_grads_formula", "silu_times", "silu_times_grads_formula"} | rotary


def test_a_compiled_norm_has_no_product_around_which_its_kernel_would_be_cut():
    counter, rows = KernelCounter(), torch.empty(6, 8, device="meta", dtype=torch.bfloat16)
    scale, weight = torch.empty(6, 1, device="meta"), torch.empty(8, device="meta")
    with counter.counting():
        compiled_layer_kernels.rms_norm_grads_formula(rows, rows, (scale,), (weight,), rows)
    assert counter.counts[""].flops("product") == 0


def test_a_second_length_makes_a_kernel_for_all_lengths(monkeypatch):
    """More of them than torch would compile one by one for; forward and backward, graphs without a code generator."""
    counter, compile_ = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=counter, **options))
    torch._dynamo.reset()
    compiled_layer_kernels._compiled.cache_clear()
    try:
        stage = build(model_config(), solo_region(), "fp32", kernels=layer_kernels("torch", compiles=True))
        for length in range(1, torch._dynamo.config.recompile_limit + 3):
            inputs, targets = (torch.zeros(2 * length, dtype=torch.int64) for _ in range(2))
            stage(inputs, micro_batch(sequence_length=length), targets).backward()
    finally:
        compiled_layer_kernels._compiled.cache_clear()
    # a length of 1 is a case of its own; norms have a case with a residual connection and one without
    assert counter.frame_count <= 3 * 8


@pytest.mark.full
@pytest.mark.slow
def test_what_a_compiler_makes_of_them():
    """Takes some 20 s: six kernels of C++ for one format, whatever the number of layers."""
    torch._dynamo.reset()
    assert_near("fp32", "selective")
