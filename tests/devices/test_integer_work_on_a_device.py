"""On a CUDA device, all that is keyed by integers has the CPU's bits: hashes, initial weights, noise, masks, sums."""

import pytest
import torch

from parallel3d.debug.digest import digest
from parallel3d.kernels.layer_kernels import layer_kernels
from parallel3d.layers.dropout import dropout
from parallel3d.layers.init import initial_value
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.parallel.sharding import UNSHARDED, ParamSharding
from parallel3d.parallel.tensor_parallel import solo_region
from parallel3d.precision.exact_sums import add_and_clear, sum_of_squares, write_floats
from parallel3d.precision.fixed_point import plan_fixed_point
from parallel3d.precision.stochastic_rounding import noise_of, round_to_bf16
from parallel3d.random_keys import bits, key_of, normal
from tests.support.kernel_forms import DEVICE

pytestmark = pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.full  # without one, the CPU stands in
N = 1_000_003
INDEX = torch.arange(N) * 7919 - 5


def edge_values():
    """Random floats of all magnitudes, with zeros, infinities, NaN, subnormals and the largest numbers among them."""
    patterns = torch.randint(-(2**31), 2**31, (N,), generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    values = patterns.to(torch.int32).view(torch.float32).clone()
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-40, 3.4028234e38, 1.0039062]
    values[: len(special)] = torch.tensor(special)
    return values


def test_random_bits_and_normal_numbers():
    key = key_of("device", 1)
    assert torch.equal(bits(key, INDEX.to(DEVICE)).cpu(), bits(key, INDEX))
    assert torch.equal(normal(key, INDEX.to(DEVICE)).cpu(), normal(key, INDEX))


def test_initial_weights():
    sharding = ParamSharding(name="w", shape=(1037, 512), dim=0, padded=True, init_std=0.02)
    ours, theirs = (initial_value(sharding, seed=3, tp=UNSHARDED, device=where) for where in (DEVICE, "cpu"))
    assert torch.equal(ours.cpu(), theirs)


def test_stochastic_rounding():
    values, noise = edge_values(), noise_of(bits(key_of("noise"), INDEX), 1)
    ours, theirs = round_to_bf16(values.to(DEVICE), noise.to(DEVICE)).cpu(), round_to_bf16(values, noise)
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def test_digests():
    """By which a transfer, a joiner and the replica check are compared."""
    values = edge_values()
    tensors = [values, values.bfloat16()[: N - 2], INDEX[:7], torch.zeros(0)]
    assert digest(tensor.to(DEVICE) for tensor in tensors) == digest(tensors)
    tensors[1][-1] += 1
    assert digest(tensor.to(DEVICE) for tensor in tensors) == digest(tensors)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_dropout_masks(kernels):
    if kernels == "triton":
        pytest.importorskip("triton")
    micro_batch = MicroBatch(seed=1, iteration=2, slots=(3, 4, 5, 9), sequence_length=50)
    results = []
    for device, name in ((DEVICE, kernels), ("cpu", "torch")):
        x = torch.ones(4 * 50, 257, device=device, requires_grad=True)
        form = layer_kernels(name).dropout
        y = dropout(x, 0.1, micro_batch=micro_batch, layer=1, site="mlp", tp=solo_region(), kernels=form)
        y.sum().backward()
        results.append((y.detach().cpu(), x.grad.cpu()))
    (ours, our_grad), (theirs, their_grad) = results
    assert torch.equal(ours, theirs) and torch.equal(our_grad, their_grad)
    assert 0 < theirs.count_nonzero() < theirs.numel()


def test_exact_sums():
    fixed = plan_fixed_point(num_tokens=4096, num_terms=8)
    terms = torch.randn(N, generator=torch.Generator().manual_seed(2))
    results = []
    for device in (DEVICE, "cpu"):
        total, floats = torch.zeros(N, dtype=torch.int64, device=device), torch.empty(N, device=device)
        for factor in (1.0, -0.25, 1e-6):
            assert add_and_clear(total, terms.to(device) * factor, fixed)
        write_floats(floats, total, fixed)
        results.append((total.cpu(), floats.cpu(), sum_of_squares(total, fixed)))
    (ours, our_floats, our_norm), (theirs, their_floats, their_norm) = results
    assert torch.equal(ours, theirs) and torch.equal(our_floats, their_floats) and our_norm == their_norm
