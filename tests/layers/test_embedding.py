"""The embedding's gradient as a device adds it up."""

import pytest
import torch

from parallel3d.layers.embedding import add_rows_on_device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_frequent_token_loses_no_row(dtype):
    """5,000 rows of 1: bf16 has 8 bits, so that 256 + 1 is 256 again where each row is rounded."""
    buffer, index = torch.zeros(3, 32, dtype=dtype), torch.ones(5000, dtype=torch.int64)
    add_rows_on_device(buffer, index, torch.ones(5000, 32, dtype=dtype))
    assert torch.equal(buffer[1], torch.full((32,), 5000.0, dtype=torch.float64).to(dtype))
    assert not buffer[0].any() and not buffer[2].any()


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2**-8), (torch.float32, 1e-6), (torch.float64, 1e-15)])
def test_rows_are_added_to_what_is_there(dtype, tolerance):
    numbers = torch.Generator().manual_seed(1)
    buffer = torch.randn(50, 8, generator=numbers).to(dtype)
    index = torch.randint(0, 50, (400,), generator=numbers)
    rows = torch.randn(400, 8, generator=numbers).to(dtype)
    expected = buffer.double().index_add(0, index, rows.double())
    add_rows_on_device(buffer, index, rows)
    assert torch.allclose(buffer.double(), expected, rtol=tolerance, atol=tolerance)
