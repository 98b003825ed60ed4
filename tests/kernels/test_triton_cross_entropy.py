"""Losses and gradients of logits by Triton are torch's in fp64; the vocabulary is whole or sharded."""

from threading import Lock

import pytest
import torch

from parallel3d.inprocess.world import run_threads
from parallel3d.kernels.launch_kernel import launch_triton
from parallel3d.kernels.layer_kernels import TORCH_KERNELS, layer_kernels
from parallel3d.parallel.group import SoloGroup
from tests.support.kernel_forms import DEVICE, DTYPES, assert_near, draw

pytest.importorskip("triton")
pytestmark = [*([pytest.mark.gpu] if DEVICE == "cuda" else []), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def problem(dtype, num_rows, vocab, padding):
    logits = draw(num_rows, vocab + padding, dtype=dtype, scale=3.0)[:, :vocab]
    targets = torch.arange(num_rows, device=DEVICE) * 37 % vocab
    targets[-1] = vocab - 1
    return logits, targets


@pytest.mark.each_value
@pytest.mark.parametrize("grad_factor", [1.0, 1024.0, None])
@pytest.mark.parametrize("num_rows, vocab, padding", [(3, 4096, 0), (2, 9001, 23), (5, 50, 14)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rank(dtype, num_rows, vocab, padding, grad_factor):
    logits, targets = problem(dtype, num_rows, vocab, padding)
    wide, group = torch.promote_types(dtype, torch.float32), SoloGroup()
    exact_grad = logits.to(torch.float64, copy=True)
    exact = TORCH_KERNELS.cross_entropy(exact_grad, targets, group, grad_factor, torch.float64)
    losses = layer_kernels("triton").cross_entropy(logits, targets, group, grad_factor, wide)
    assert losses.dtype is wide
    assert_near(losses, exact, terms=8)
    if grad_factor is not None:
        assert_near(logits, exact_grad, terms=8)


@pytest.mark.parametrize("value", [1e4, -1e4])
def test_large_logits_do_not_overflow(value):
    logits = torch.full((1, 5000), value, device=DEVICE)
    logits[0, 3] += 2.0
    targets = torch.tensor([3], device=DEVICE)
    exact_grad = logits.double()
    exact = TORCH_KERNELS.cross_entropy(exact_grad, targets, SoloGroup(), 1.0, torch.float64)
    losses = layer_kernels("triton").cross_entropy(logits, targets, SoloGroup(), 1.0, torch.float32)
    assert_near(losses, exact)
    assert_near(logits, exact_grad, terms=8)


@pytest.mark.skipif(DEVICE != "cpu", reason="ranks are threads of one process on the CPU")
@pytest.mark.parametrize("vocab", [5, 300])
def test_four_ranks(vocab):
    """5 tokens over 4 ranks: 2, 2, 1, 0."""
    from parallel3d.kernels.triton_layer_kernels import triton_layer_kernels

    logits, targets = problem(torch.float64, 6, vocab, 0)
    exact_grad = logits.clone()
    exact = TORCH_KERNELS.cross_entropy(exact_grad, targets, SoloGroup(), 1.0, torch.float64)
    part, interpreter = -(-vocab // 4), Lock()

    def one_at_a_time(*args, **options):
        with interpreter:
            launch_triton(*args, **options)

    def body(rank, world):
        group = world.make_group(rank)("tp", (0, 1, 2, 3))
        own = logits[:, rank * part : (rank + 1) * part].clone()
        kernels = triton_layer_kernels(one_at_a_time)
        return kernels.cross_entropy(own, targets - rank * part, group, 1.0, torch.float64), own

    results = run_threads(4, body)
    assert all(torch.equal(losses, results[0][0]) for losses, _ in results)
    torch.testing.assert_close(results[0][0], exact, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.cat([grad for _, grad in results], 1), exact_grad, rtol=1e-13, atol=1e-13)
