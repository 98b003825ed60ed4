"""Kernels in C give what torch gives in fp64; their bits depend neither on threads nor on the processor."""

import platform

import pytest
import torch

from parallel3d.compiled_loops import loop_library
from parallel3d.inprocess.world import run_threads
from parallel3d.kernels import c_attention, c_loops, c_norms
from parallel3d.kernels.c_sums import add_product
from parallel3d.kernels.layer_kernels import TORCH_KERNELS, layer_kernels
from parallel3d.kernels.torch_rotary import HeadLayout
from parallel3d.layers.parameter import parameters_of
from parallel3d.parallel.group import SoloGroup
from parallel3d.parallel.tensor_parallel import TensorParallel, solo_region
from tests.support.kernel_forms import assert_near, doubles
from tests.support.tiny_stages import build, micro_batch, model_config, relative, tokens

pytestmark = pytest.mark.skipif(not c_loops.has_c_loops(), reason="no C compiler with OpenMP")
DTYPES = (torch.bfloat16, torch.float32)
FP32, FP64 = torch.float32, torch.float64
LAYOUT = HeadLayout(num_query_heads=4, num_kv_heads=2, head_size=40)  # halves of 20: one vector, and four lanes
OURS, EXACT = layer_kernels("c"), TORCH_KERNELS


def draw(*shape, dtype, seed=1, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=FP64) * scale).to(dtype)


# Blocks of rows, the last one smaller, and no row; widths of whole vectors and others.
@pytest.mark.each_value
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("num_rows, width", [(3, 64), (70, 257), (0, 48)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norms(name, dtype, num_rows, width, has_delta):
    """LayerNorm of numbers around 3: it takes the mean away before it squares."""
    norm, exact_norm = getattr(OURS, name), getattr(EXACT, name)
    x, delta, grad, residual_grad = (draw(num_rows, width, dtype=dtype, seed=seed) for seed in range(4))
    parameters = tuple(draw(width, dtype=dtype, seed=seed) for seed in (4, 5)[: 1 + (name == "layer_norm")])
    x = x + 3 if name == "layer_norm" else x
    delta, residual_grad = (delta, residual_grad) if has_delta else (None, None)
    total, y, statistics = norm.forward(x, delta, parameters, 1e-5, FP32)
    assert total is x if delta is None else torch.equal(total, x + delta)
    found = norm.backward(grad, total, statistics, parameters, residual_grad)
    assert y.shape == found.total.shape == x.shape and len(found.parameters) == len(parameters)
    if num_rows == 0:
        assert not any(each.any() for each in found.parameters)
        return
    wide, extra = doubles(*parameters), residual_grad.double() if has_delta else None
    _, expected, exact_statistics = exact_norm.forward(total.double(), None, wide, 1e-5, FP64)
    assert_near(y, expected, terms=8)
    exact = exact_norm.backward(grad.double(), total.double(), exact_statistics, wide, extra)
    assert_near(found.total, exact.total, terms=8)
    for ours, theirs in zip(found.parameters, exact.parameters):
        assert_near(ours, theirs, terms=num_rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(dtype):
    """Gates from -90 to 90: the exponential's ends as well."""
    gate_up, grad = draw(30, 94, dtype=dtype, scale=2.0), draw(30, 47, dtype=dtype, seed=2)
    gate_up[0, :47] = torch.linspace(-90, 90, 47)
    assert_near(OURS.silu_times.forward(gate_up), EXACT.silu_times.forward(gate_up.double()), terms=1)
    found = OURS.silu_times.backward(grad, gate_up, None)
    for ours, exact in zip(found, EXACT.silu_times.backward(grad.double(), gate_up.double(), None)):
        assert_near(ours, exact, terms=4)


@pytest.mark.parametrize("dtype", [*DTYPES, FP64], ids=str)
def test_gelu(dtype):
    """And far from zero, where the gradient is 0 or 1; fp64 takes torch's form."""
    x, grad, ours, exact = draw(30, 94, dtype=dtype), draw(30, 94, dtype=dtype, seed=2), OURS.gelu, EXACT.gelu["tanh"]
    x[0] = torch.linspace(-90, 90, 94)
    expected = exact.forward(x.double())
    assert not ours["tanh"].keeps_result and ours["none"] == EXACT.gelu["none"]
    assert_near(ours["tanh"].forward(x), expected, terms=4)
    x_grad, again = ours["tanh"].backward(grad, x, None)
    assert torch.equal(again, ours["tanh"].forward(x))
    assert_near(x_grad, exact.backward(grad.double(), x.double(), expected)[0], terms=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary(dtype):
    qkv = draw(2, 9, LAYOUT.query_size + 2 * LAYOUT.kv_size, dtype=dtype)
    cos, sin = (draw(9, 20, dtype=FP32, seed=seed) for seed in (2, 3))
    found = OURS.rotary.forward(qkv, cos, sin, LAYOUT, may_overwrite=False)
    exact = EXACT.rotary.forward(*doubles(qkv, cos, sin), LAYOUT, may_overwrite=False)
    for ours, expected in zip(found, exact):
        assert_near(ours, expected, terms=2)
    grads = (found[0].contiguous(), found[1], found[2])  # token by token, or head by head as attention gives them
    expected = EXACT.rotary.backward(*doubles(*grads, cos, sin), LAYOUT)
    assert_near(OURS.rotary.backward(*grads, cos, sin, LAYOUT), expected, terms=2)


@pytest.mark.parametrize("grad_factor", [1.0, 1024.0, None])
@pytest.mark.parametrize("vocab", [512, 1003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(dtype, vocab, grad_factor):
    logits = draw(9, vocab + 5, dtype=dtype, scale=4.0)[:, :vocab]  # rows that don't follow each other
    logits[1, 2], logits[2] = 1e4, -1e4
    targets, exact = torch.arange(9) * 37 % vocab, logits.to(FP64, copy=True)
    expected = EXACT.cross_entropy(exact, targets, SoloGroup(), grad_factor, FP64)
    losses = OURS.cross_entropy(logits, targets, SoloGroup(), grad_factor, FP32)
    assert losses.dtype is FP32
    assert_near(losses, expected, terms=8)
    if grad_factor:
        # below exp(-87) everything is exp(-87)
        assert_near(logits, exact, terms=8, ulps=64 if dtype is FP32 else None)


@pytest.mark.parametrize("vocab", [5, 300])
def test_cross_entropy_of_four_ranks(vocab):
    """5 tokens over 4 ranks: 2, 2, 1, 0."""
    logits, targets, part = draw(6, vocab, dtype=FP32), torch.arange(6) * 37 % vocab, -(-vocab // 4)
    exact = logits.double()
    expected = EXACT.cross_entropy(exact, targets, SoloGroup(), 1.0, FP64)

    def body(rank, world):
        group = world.make_group(rank)("tp", (0, 1, 2, 3))
        own = logits[:, rank * part : (rank + 1) * part].clone()
        return OURS.cross_entropy(own, targets - rank * part, group, 1.0, FP32), own

    results = run_threads(4, body)
    assert all(torch.equal(losses, results[0][0]) for losses, _ in results)
    assert_near(results[0][0], expected, terms=8)
    assert_near(torch.cat([grad for _, grad in results], 1), exact, terms=8)


@pytest.mark.parametrize("number", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_visible(dtype, number):
    """The loss and the gradients of a row with one such number are NaN: the trainer sees that the run diverged."""
    logits, x = draw(3, 70, dtype=dtype), draw(3, 64, dtype=dtype)
    logits[1, 65] = x[1, 5] = number
    losses = OURS.cross_entropy(logits, torch.arange(3), SoloGroup(), 1.0, FP32)
    assert losses.isfinite().tolist() == [True, False, True] and not logits[1].isfinite().any()
    for row, each in zip((1, 1), (OURS.silu_times.forward(x), *OURS.rms_norm.forward(x, x, (x[0],), 1e-5, FP32)[:2])):
        assert not each[row].isfinite().all() and each[0].isfinite().all()


def test_products_are_added_with_the_bits_of_torch():
    for size in (1, 15, 16, 5000, 3 * 4096):
        total, product = draw(size, dtype=FP32), draw(size, dtype=torch.bfloat16, seed=2)
        expected = total + product
        add_product(total, product)
        assert torch.equal(total, expected)
    total = draw(6, 4, dtype=FP32)
    expected = total.t() + product[:24].view(4, 6)
    add_product(total.t(), product[:24].view(4, 6))  # not contiguous: by torch
    assert torch.equal(total.t(), expected)


def everything(dtype):
    """All results of all kernels for some rows, the parts of a weight's gradient by blocks of rows among them."""
    x, delta, grad = (draw(70, 96, dtype=dtype, seed=seed) for seed in range(3))
    weight = (draw(96, dtype=dtype, seed=4),)
    total, y, statistics = OURS.rms_norm.forward(x, delta, weight, 1e-5, FP32)
    grads = OURS.rms_norm.backward(grad, total, statistics, weight, delta)
    layer = OURS.layer_norm.forward(x, delta, 2 * weight, 1e-5, FP32)
    layer_grads = OURS.layer_norm.backward(grad, layer.total, layer.statistics, 2 * weight, delta)
    swiglu = OURS.silu_times.backward(grad[:, :48], x, None)
    gelu = OURS.gelu["tanh"].backward(grad, x, None)
    logits = x.clone()
    losses = OURS.cross_entropy(logits, torch.arange(70), SoloGroup(), 1.0, FP32)
    norms = [total, y, *statistics, grads.total, *grads.parameters]
    norms += [layer.y, *layer.statistics, layer_grads.total, *layer_grads.parameters]
    return [*norms, *swiglu, OURS.silu_times.forward(x), *gelu, OURS.gelu["tanh"].forward(x), losses, logits]


def assert_bits(ours, theirs):
    assert [number for number, pair in enumerate(zip(ours, theirs)) if not torch.equal(*pair)] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_threads(dtype):
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(everything(dtype))
    finally:
        torch.set_num_threads(threads)
    assert_bits(*found)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_processor(dtype, processor, monkeypatch):
    """Vectors of 4 and 8 numbers, with and without a fused multiplication and addition, instead of this machine's."""
    found = everything(dtype)
    other = loop_library(c_loops._LAYERS, "-fopenmp", f"-march={processor}")
    monkeypatch.setattr(c_loops, "_library", lambda _source: other)
    assert other is not None
    assert_bits(everything(dtype), found)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86")
@pytest.mark.parametrize("processor", ["native", "x86-64", "x86-64-v3"])
def test_what_is_too_small_for_a_normal_number_in_bf16_is_zero_on_all_processors(processor, monkeypatch):
    """Infinities and NaNs are not touched."""
    library = loop_library(c_loops._LAYERS, "-fopenmp", f"-march={processor}")
    monkeypatch.setattr(c_loops, "_library", lambda _source: library)
    smallest = torch.finfo(torch.bfloat16).tiny
    x = torch.tensor([[smallest, -smallest, smallest / 2, -smallest / 2, torch.inf, -torch.inf, torch.nan, 3.0]])
    total = OURS.rms_norm.forward(x.bfloat16(), torch.zeros_like(x).bfloat16(), (torch.ones(8),), 1e-5, FP32).total
    expected = torch.tensor([[smallest, -smallest, 0.0, 0.0, torch.inf, -torch.inf, torch.nan, 3.0]])
    torch.testing.assert_close(total.float(), expected, rtol=0, atol=0, equal_nan=True)


def test_sums_do_not_depend_on_what_follows():
    """A block's part of a weight's gradient is that of the same rows alone; every other row stands for itself."""
    x, grad, weight = (draw(*shape, dtype=FP32, seed=seed) for seed, shape in enumerate(((64, 24), (64, 24), (24,))))

    def grads(rows):
        total, _, statistics = OURS.rms_norm.forward(x[rows], None, (weight,), 1e-5, FP32)
        return OURS.rms_norm.backward(grad[rows], total, statistics, (weight,), None)

    first, second, both = (grads(rows) for rows in (slice(0, 32), slice(32, 64), slice(0, 64)))
    assert torch.equal(both.parameters[0], first.parameters[0] + second.parameters[0])
    assert torch.equal(both.total, torch.cat([first.total, second.total]))


def test_the_constants_are_those_of_the_source():
    layers = c_loops._LAYERS.read_text()
    attention = c_loops._ATTENTION.with_name("attention_products.h").read_text()
    assert f"#define BLOCK_ROWS {c_norms._BLOCK_ROWS} " in layers
    assert f"#define TILE {c_attention._TILE}\n" in attention
    assert f"#define QUERIES {c_attention._QUERIES} " in attention
    assert f"#define TILES {c_attention._TILES}\n" in attention


# fp32: operations in another order. bf16: torch's operators round after each, a kernel once; 8 bits. fp64: torch's.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp64": 0.0}


def gradients(kernels, policy, tp=None, recompute="none"):
    config = model_config(num_hidden_layers=1, num_key_value_heads=2)
    stage = build(config, tp or solo_region(), policy, recompute, kernels=kernels)
    inputs, targets = tokens(config.vocab_size)
    loss = stage(inputs, micro_batch(), targets)
    loss.backward()
    return {p.sharding.name: p.main_grad for p in parameters_of(stage)} | {"loss": loss.detach()}


def far(ours, theirs, policy):
    distances = {name: relative(ours[name], theirs[name]) for name in theirs}
    return {name: distance for name, distance in distances.items() if not distance <= TOLERANCE[policy]}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("policy", TOLERANCE)
def test_layers(policy, recompute):
    assert far(gradients(OURS, policy, recompute=recompute), gradients(EXACT, policy), policy) == {}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_of_two_ranks(sequence_parallel):
    def body(rank, world):
        tp = TensorParallel(group=world.make_group(rank)("tp", (0, 1)), sequence_parallel=sequence_parallel)
        return [gradients(form, "fp32", tp) for form in (OURS, EXACT)]

    assert [far(ours, theirs, "fp32") for ours, theirs in run_threads(2, body)] == [{}, {}]
