"""Gradients of embedding and positions as a device adds them up, by torch's operators and by Triton's kernels."""

import pytest
import torch

from parallel3d.kernels import torch_embedding
from parallel3d.kernels.layer_kernels import layer_kernels
from parallel3d.layers.micro_batch import TokenSpan
from parallel3d.layers.positions import add_sequences, common_positions
from tests.support.kernel_forms import DEVICE


@pytest.fixture(params=["torch", "triton"])
def add_rows(request, monkeypatch):
    """The CPU takes a device's branches here."""
    if request.param == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(torch_embedding, "is_accelerator", lambda device: True)
    return layer_kernels(request.param).add_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_frequent_token_loses_no_row(add_rows, dtype):
    """5,000 rows of 1: bf16 has 8 bits, so that 256 + 1 is 256 again where each row is rounded."""
    buffer, index = torch.zeros(3, 32, dtype=dtype, device=DEVICE), torch.ones(5000, dtype=torch.int64, device=DEVICE)
    add_rows(buffer, index, torch.ones(5000, 32, dtype=dtype, device=DEVICE))
    assert torch.equal(buffer[1].cpu(), torch.full((32,), 5000.0, dtype=torch.float64).to(dtype))
    assert not buffer[0].any() and not buffer[2].any()


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2**-8), (torch.float32, 1e-6), (torch.float64, 1e-15)])
def test_rows_are_added_to_what_is_there(add_rows, dtype, tolerance):
    """Those of other ranks' ids, below and above, are not."""
    numbers = torch.Generator().manual_seed(1)
    buffer = torch.randn(50, 8, generator=numbers).to(dtype)
    index = torch.randint(-10, 60, (400,), generator=numbers)
    rows = torch.randn(400, 8, generator=numbers).to(dtype)
    here = (index >= 0) & (index < 50)
    expected = buffer.double().index_add(0, index[here], rows[here].double())
    ours = buffer.to(DEVICE, copy=True)
    add_rows(ours, index.to(DEVICE), rows.to(DEVICE))
    assert torch.allclose(ours.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def span(positions):
    return TokenSpan(slot=0, positions=positions, rows=slice(0, len(positions)))


def test_sequences_share_their_positions_unless_they_are_documents():
    assert common_positions([span(range(4, 8)), span(range(4, 8))]) == range(4, 8)
    assert common_positions([span(range(8))]) == range(8)
    assert common_positions([span(range(8)), span(range(5))]) is None


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2**-8), (torch.float32, 1e-6)])
def test_the_positions_of_many_sequences_are_added_once(dtype, tolerance):
    numbers = torch.Generator().manual_seed(2)
    buffer = torch.randn(6, 8, generator=numbers).to(dtype)
    grad = torch.ones(500 * 6, 8, dtype=dtype)
    expected = buffer.double() + 500
    add_sequences(buffer, grad)
    assert torch.allclose(buffer.double(), expected, rtol=tolerance, atol=0)
