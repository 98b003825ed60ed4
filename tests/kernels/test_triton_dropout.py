"""Dropout by Triton is bitwise torch's, for any part of a micro-batch."""

import pytest
import torch

from parallel3d.kernels.layer_kernels import TORCH_KERNELS, layer_kernels
from parallel3d.kernels.torch_dropout import DropoutMask
from parallel3d.random_keys import key_of
from tests.support.kernel_forms import DEVICE, DTYPES, draw

pytest.importorskip("triton")
pytestmark = [*([pytest.mark.gpu] if DEVICE == "cuda" else []), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
EDGES = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-7, -1e4]
SEQ, BATCH = 7, 3


def bits_of(tensor):
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.where(tensor.isnan(), torch.zeros_like(tensor) - 7, tensor).view(integers[tensor.dtype.itemsize])


@pytest.mark.each_value
@pytest.mark.parametrize("probability", [0.1, 0.5, 1 / 3])
@pytest.mark.parametrize("first, num_local", [(0, SEQ * BATCH), (5, 10), (14, 7)])
@pytest.mark.parametrize("width", [24, 1030])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_passes(dtype, width, first, num_local, probability):
    assert_same_bits(draw(num_local, width, dtype=dtype), SEQ, BATCH, first, probability)


@pytest.mark.full
def test_both_passes_of_a_million():
    assert_same_bits(draw(140, 7167, dtype=torch.bfloat16), seq=50, batch=3, first=7, probability=0.1)


def assert_same_bits(x, seq, batch, first, probability):
    keys = tuple(key_of("a test", slot) for slot in range(batch))
    mask = DropoutMask(keys=keys, sequence_length=seq, first_token=first, probability=probability)
    x[:, : len(EDGES)] = torch.tensor(EDGES, device=DEVICE)
    ours, theirs = layer_kernels("triton").dropout, TORCH_KERNELS.dropout
    y, kept = ours.forward(x, mask)
    expected, their_kept = theirs.forward(x, mask)
    assert 0 < (~their_kept).float().mean() < 1
    assert kept.nbytes == batch * 16  # nothing of the size of x
    assert torch.equal(bits_of(y), bits_of(expected))
    assert torch.equal(bits_of(ours.backward(x, mask, kept)), bits_of(theirs.backward(x, mask, their_kept)))
