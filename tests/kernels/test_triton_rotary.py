"""The split of a fused projection with rotary positions by Triton is torch's, in place or not."""

import pytest
import torch

from parallel3d.kernels.layer_kernels import TORCH_KERNELS, layer_kernels
from parallel3d.kernels.torch_rotary import HeadLayout
from parallel3d.layers.rotary import RotaryTable
from tests.support.kernel_forms import DEVICE, DTYPES, assert_near, doubles, draw

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
BATCH, SEQ = 2, 5
LAYOUTS = [
    HeadLayout(num_query_heads=4, num_kv_heads=4, head_size=8),
    HeadLayout(num_query_heads=6, num_kv_heads=2, head_size=12),
    HeadLayout(num_query_heads=20, num_kv_heads=5, head_size=128),
]


def problem(dtype, heads):
    qkv = draw(BATCH, SEQ, heads.query_size + 2 * heads.kv_size, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    table = RotaryTable.build(SEQ, heads.head_size, 1e4, wide, DEVICE)
    return qkv, table.cos, table.sin


@pytest.mark.each_value
@pytest.mark.parametrize("may_overwrite", [False, True])
@pytest.mark.parametrize("heads", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(dtype, heads, may_overwrite):
    qkv, cos, sin = problem(dtype, heads)
    given = qkv.clone()
    found = layer_kernels("triton").rotary.forward(given, cos, sin, heads, may_overwrite=may_overwrite)
    expected = TORCH_KERNELS.rotary.forward(*doubles(qkv, cos, sin), heads, may_overwrite=False)
    for ours, exact in zip(found, expected):
        assert_near(ours, exact)
    assert torch.equal(given, qkv) is not may_overwrite
    if may_overwrite:
        memory = given.untyped_storage().data_ptr()
        assert all(each.untyped_storage().data_ptr() == memory for each in found)


@pytest.mark.each_value
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("heads", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(dtype, heads, is_transposed):
    """Gradients of attention lie by tokens or by heads."""
    _, cos, sin = problem(dtype, heads)
    sizes = (heads.num_query_heads, heads.num_kv_heads, heads.num_kv_heads)
    grads = [draw(BATCH, SEQ, num, heads.head_size, dtype=dtype, seed=seed) for seed, num in enumerate(sizes)]
    if is_transposed:
        grads = [grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads]
    found = layer_kernels("triton").rotary.backward(*grads, cos, sin, heads)
    assert_near(found, TORCH_KERNELS.rotary.backward(*doubles(*grads, cos, sin), heads))
