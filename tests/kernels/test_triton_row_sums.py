"""Sums over rows by Triton are near those in fp64, and cut by numbers of rows alone."""

import pytest
import torch

from parallel3d.kernels.layer_kernels import layer_kernels
from tests.support.kernel_forms import DEVICE, DTYPES, assert_near, draw

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.each_value
@pytest.mark.parametrize("num_rows, width", [(1, 128), (300, 257), (1025, 24)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums(dtype, num_rows, width):
    x = draw(num_rows, width, dtype=dtype)
    found = layer_kernels("triton").sum_rows(x, torch.bfloat16)
    assert found.dtype is torch.promote_types(dtype, torch.float32)
    assert_near(found, x.double().sum(0), terms=num_rows)


def test_a_part_is_the_sum_of_its_rows_alone():
    x, sum_rows = draw(512, 8, dtype=torch.float32), layer_kernels("triton").sum_rows
    first, second = sum_rows(x[:256], torch.float32), sum_rows(x[256:], torch.float32)
    assert torch.equal(sum_rows(x, torch.float32), first + second)
