"""The projection with its loss, in token blocks over a sharded vocabulary, against torch's on the whole logits."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.inprocess.world import run_threads
from parallel3d.layers import cross_entropy as module
from parallel3d.layers.cross_entropy import LinearCrossEntropy
from parallel3d.layers.gemm import Gemm
from parallel3d.layers.gradient_sink import GradientSink
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.tensor_parallel import TensorParallel, solo_region
from parallel3d.precision.policy import Policy

VOCAB, HIDDEN, TOKENS = 50257, 8, 24


@cache
def problem(vocab=VOCAB, tokens=TOKENS, scale=1.0):
    """hidden, whole weight, targets; among the targets the first and last token of each rank of four."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator) * scale
    weight = torch.randn(vocab, HIDDEN, dtype=torch.float64, generator=generator)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    part = -(-vocab // 4)
    edges = [edge for rank in range(4) for edge in (rank * part, rank * part + part - 1) if edge < vocab] + [vocab - 1]
    targets[: len(edges)] = torch.tensor(edges)[:tokens]
    return hidden, weight, targets


@cache
def reference(**sizes):
    """Loss and both gradients, torch in fp64 on the whole matrix of logits."""
    hidden, weight, targets = problem(**sizes)
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def make_layer(tp, weight, dtype=torch.float64, keep_fp32_dtype=None):
    vocab, hidden_size = weight.shape
    wide = torch.promote_types(dtype, torch.float32)
    policy = Policy(name="test", compute=dtype, grad=wide, state=wide, keep_fp32_dtype=keep_fp32_dtype or dtype)
    layer = LinearCrossEntropy("head", vocab, hidden_size, init_std=0.02, context=LayerContext(tp=tp, policy=policy))
    layer.weight.data.fill_(float("nan"))  # padding must not matter
    layer.weight.data[: layer.num_valid] = weight[layer.first : layer.first + layer.num_valid].to(dtype)
    return layer


def run(tp_size, sequence_parallel=False, dtype=torch.float64, keep_fp32_dtype=None, **sizes):
    """Returns for each rank the loss, the gradients of its hidden states and of its rows, and its first row."""
    hidden, weight, targets = problem(**sizes)

    def body(rank, world):
        group = world.make_group(rank)("tp", tuple(range(tp_size)))
        tp = TensorParallel(group=group, sequence_parallel=sequence_parallel)
        layer = make_layer(tp, weight, dtype, keep_fp32_dtype)
        own = hidden.chunk(tp_size)[rank] if tp.is_token_sharded else hidden
        own = own.to(dtype, copy=True).requires_grad_()
        loss = layer(own, targets)
        loss.backward()
        return loss.detach(), own.grad, layer.weight.main_grad, layer.first, layer.num_valid

    return run_threads(tp_size, body)


def assert_like_reference(results, sequence_parallel=False, tolerance=1e-12, **sizes):
    loss, hidden_grad, weight_grad = reference(**sizes)
    for rank, (ours, ours_hidden, ours_weight, first, num_valid) in enumerate(results):
        assert ours.dtype is torch.float64 and ours.shape == ()
        assert ours.item() == pytest.approx(loss.item(), rel=tolerance)
        expected = hidden_grad.chunk(len(results))[rank] if sequence_parallel else hidden_grad
        torch.testing.assert_close(ours_hidden.double(), expected, rtol=tolerance, atol=tolerance)
        expected = weight_grad[first : first + num_valid]
        torch.testing.assert_close(ours_weight[:num_valid].double(), expected, rtol=tolerance, atol=tolerance)
        assert not ours_weight[num_valid:].any()
    assert sum(num_valid for *_, num_valid in results) == len(weight_grad)


# Of logits in fp64 over 12,565 rows: one token at a time, five (the last block is smaller), all.
@pytest.mark.parametrize("token_block_bytes", [1, 5 * 8 * 12565, 1 << 30])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("gradient_block_bytes", [1, 10 * 8 * 12565])
def test_50257_tokens_over_4_ranks(gradient_block_bytes, token_block_bytes, sequence_parallel, monkeypatch):
    """With a product for the weight of each block of logits, or of two."""
    monkeypatch.setattr(module, "TOKEN_BLOCK_BYTES", token_block_bytes)
    monkeypatch.setattr(module, "LEAST_BLOCK_TOKENS", 1)
    monkeypatch.setattr(module, "GRADIENT_BLOCK_BYTES", gradient_block_bytes)
    assert_like_reference(run(4, sequence_parallel), sequence_parallel)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_rows_of_logits_begin_at_aligned_addresses_on_a_device(monkeypatch, dtype, tolerance):
    """The CPU takes a device's branches here, which lay the logits out in a part of a wider matrix."""
    monkeypatch.setattr(module, "is_accelerator", lambda device: True)
    monkeypatch.setattr(module, "DEVICE_TOKEN_BLOCK_BYTES", 10 * 4 * VOCAB)
    shapes, forward = [], Gemm.forward
    monkeypatch.setattr(
        Gemm, "forward", lambda *args, out: shapes.append((out.shape, out.stride())) or forward(*args, out=out)
    )
    assert_like_reference(run(1, dtype=dtype), tolerance=tolerance)
    assert shapes[0] == ((10 if dtype is torch.float32 else 5, VOCAB), (50304, 1))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_fewer_ranks(tp_size):
    assert_like_reference(run(tp_size))


def test_a_rank_without_a_single_row():
    """5 tokens over 4 ranks: 2, 2, 1, 0."""
    sizes = dict(vocab=5, tokens=8)
    results = run(4, **sizes)
    assert [num_valid for *_, num_valid in results] == [2, 2, 1, 0]
    assert_like_reference(results, **sizes)


def test_fp32():
    """Sums of 50,257 exponentials in fp32: some 1e-6 relative."""
    assert_like_reference(run(4, dtype=torch.float32), tolerance=1e-5)


def test_bf16_activations_with_an_fp32_softmax():
    """bf16 has 8 bits: inputs, logits and gradients are rounded to 2**-9."""
    results = run(4, dtype=torch.bfloat16, keep_fp32_dtype=torch.float32)
    loss, hidden_grad, _ = reference()
    assert {result[0].item() for result in results} == {results[0][0].item()}
    assert results[0][0].item() == pytest.approx(loss.item(), rel=0.01)
    difference = (results[0][1].double() - hidden_grad).norm() / hidden_grad.norm()
    assert difference < 0.02 and results[0][2].dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_logits_do_not_overflow(dtype):
    """Logits up to some 1e4, whose exponentials overflow."""
    sizes = dict(vocab=1001, scale=1e3)
    hidden, weight, _ = problem(**sizes)
    assert (hidden @ weight.t()).abs().max() > 5e3
    results = run(4, dtype=dtype, **sizes)
    if dtype is torch.float64:
        return assert_like_reference(results, tolerance=1e-9, **sizes)
    assert results[0][0].item() == pytest.approx(reference(**sizes)[0].item(), rel=1e-5)
    assert all(grad.isfinite().all() for _, *grads, _, _ in results for grad in grads)


def test_gradients_are_added_to_what_is_there():
    """Two micro-batches: the main gradient is their sum."""
    hidden, weight, targets = problem(vocab=101)
    layer = make_layer(solo_region(), weight)
    calls: list[int] = []
    layer.weight.attach(GradientSink.with_own_buffer(layer.weight, on_added=lambda: calls.append(1)))
    for part in (slice(0, 10), slice(10, TOKENS)):
        layer(hidden[part].clone().requires_grad_(), targets[part]).backward()
    torch.testing.assert_close(layer.weight.main_grad, reference(vocab=101)[2], rtol=1e-12, atol=1e-12)
    assert calls == [1, 1]


def test_evaluation_computes_no_gradient():
    hidden, weight, targets = problem(vocab=101)
    layer = make_layer(solo_region(), weight)
    with torch.no_grad():
        loss = layer(hidden, targets)
    assert loss.item() == pytest.approx(reference(vocab=101)[0].item(), rel=1e-12)
    assert layer.weight.main_grad is None


@pytest.mark.parametrize(
    "vocab_size, dtype, rows",
    [
        (8192, torch.bfloat16, 512),  # 8 MiB
        (50257, torch.bfloat16, 256),
        (50257, torch.float32, 256),
        (1 << 18, torch.bfloat16, 128),  # 64 MiB
        (1 << 26, torch.float32, 1),
    ],
)
def test_a_block_of_logits_has_enough_tokens_for_fast_products(vocab_size, dtype, rows):
    assert module.block_rows(vocab_size, dtype, "cpu") == rows


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation has returned, views aside."""

    num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def test_the_whole_logits_never_exist(monkeypatch):
    """The largest tensor has the weight's size, or is a block of the logits' gradients."""
    monkeypatch.setattr(module, "TOKEN_BLOCK_BYTES", 2 * VOCAB * 4)
    monkeypatch.setattr(module, "LEAST_BLOCK_TOKENS", 1)
    monkeypatch.setattr(module, "GRADIENT_BLOCK_BYTES", 12 * VOCAB * 4)
    _, weight, _ = problem()
    layer = make_layer(solo_region(), weight, torch.float32)
    hidden = torch.randn(100, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    targets = torch.arange(100)
    with LargestTensor() as whole:
        F.cross_entropy(hidden @ layer.weight.detach().t(), targets, reduction="sum")
    assert whole.num_elements == 100 * VOCAB  # the counter sees it where it is made
    with LargestTensor() as largest:
        layer(hidden, targets).backward()
    assert largest.num_elements == 12 * VOCAB
