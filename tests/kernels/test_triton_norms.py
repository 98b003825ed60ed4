"""Norms by Triton give what torch gives in fp64, with and without a residual connection."""

import pytest
import torch

from parallel3d.kernels.layer_kernels import TORCH_KERNELS, layer_kernels
from tests.support.kernel_forms import DEVICE, DTYPES, assert_near, doubles, draw

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
EPS = 1e-5


def problem(kind, dtype, num_rows, width):
    x, delta, grad, residual_grad = (draw(num_rows, width, dtype=dtype, seed=seed) for seed in range(4))
    weight, bias = (draw(width, dtype=dtype, seed=seed) for seed in (4, 5))
    return x, delta, grad, residual_grad, (weight,) if kind == "rms_norm" else (weight, bias)


# One block of rows, blocks of which the last is smaller; widths that fill a block and others.
@pytest.mark.each_value(rest=4)
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("num_rows, width", [(3, 64), (70, 48), (33, 257), (2100, 24)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_both_passes(kind, dtype, num_rows, width, has_delta):
    x, delta, grad, residual_grad, parameters = problem(kind, dtype, num_rows, width)
    ours, exact = getattr(layer_kernels("triton"), kind), getattr(TORCH_KERNELS, kind)
    wide = torch.promote_types(dtype, torch.float32)
    delta, residual_grad = (delta, residual_grad) if has_delta else (None, None)

    total, y, statistics = ours.forward(x, delta, parameters, EPS, wide)
    assert total is x if delta is None else torch.equal(total, x + delta)
    assert y.dtype is dtype and all(each.dtype is wide for each in statistics)
    _, expected, wide_statistics = exact.forward(total.double(), None, doubles(*parameters), EPS, torch.float64)
    assert_near(y, expected, terms=8)

    found = ours.backward(grad, total, statistics, parameters, residual_grad)
    extra = residual_grad.double() if has_delta else None
    expected = exact.backward(grad.double(), total.double(), wide_statistics, doubles(*parameters), extra)
    assert_near(found.total, expected.total, terms=8)
    assert len(found.parameters) == len(parameters)
    for ours_grad, expected_grad in zip(found.parameters, expected.parameters):
        assert ours_grad.dtype is wide
        assert_near(ours_grad, expected_grad, terms=num_rows)


def test_sums_do_not_depend_on_what_follows():
    """A block's part of a weight's gradient is that of the same rows alone: sums are cut by rows, not by programs."""
    x, _, grad, _, parameters = problem("rms_norm", torch.float32, 64, 16)
    norm = layer_kernels("triton").rms_norm

    def weight_grad(rows):
        total, _, statistics = norm.forward(x[rows], None, parameters, EPS, torch.float32)
        return norm.backward(grad[rows], total, statistics, parameters, None).parameters[0]

    first, second, both = (weight_grad(rows) for rows in (slice(0, 32), slice(32, 64), slice(0, 64)))
    assert torch.equal(both, first + second)
