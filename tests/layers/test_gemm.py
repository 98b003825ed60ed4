"""Matrix products are torch's, whichever kernel computes them."""

import pytest
import torch

from parallel3d.inprocess.live_bytes import LiveBytes
from parallel3d.kernels import c_weight_grad
from parallel3d.kernels.c_loops import has_tiles
from parallel3d.layers import gemm
from parallel3d.layers.gemm import Gemm, add_matmul, matmul

# fp32 sums of 300 products of normal numbers: errors of some sqrt(300) x 2**-24 x 17, in another order on each kernel.
TOLERANCE = dict(rtol=1e-5, atol=1e-4)
SMALL, LARGE, TALL, ODD = (8, 16, 8), (64, 300, 96), (96, 300, 64), (67, 301, 93)


def numbers(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def factors(size, transposed_a, transposed_b, dtype=torch.float32):
    m, k, n = size
    a = numbers(1, k, m, dtype=dtype).t() if transposed_a else numbers(1, m, k, dtype=dtype)
    b = numbers(2, n, k, dtype=dtype).t() if transposed_b else numbers(2, k, n, dtype=dtype)
    return a, b


@pytest.fixture
def onednn_calls(monkeypatch):
    """How often the module has chosen oneDNN (True) and how often torch's own product."""
    calls = []
    choose = gemm._fits_onednn
    monkeypatch.setattr(gemm, "_fits_onednn", lambda *product: calls.append(choose(*product)) or calls[-1])
    return calls


@pytest.mark.parametrize("transposed_a", [False, True])
@pytest.mark.parametrize("transposed_b", [False, True])
@pytest.mark.parametrize("size", [SMALL, LARGE, TALL, ODD], ids=str)
def test_matmul_of_views(size, transposed_a, transposed_b, onednn_calls):
    a, b = factors(size, transposed_a, transposed_b)
    product = matmul(a, b)
    assert product.shape == (size[0], size[2]) and product.dtype is torch.float32
    torch.testing.assert_close(product.double(), a.double() @ b.double(), **TOLERANCE)
    assert onednn_calls == [size != SMALL]


@pytest.mark.parametrize("transposed_a", [False, True])
@pytest.mark.parametrize("transposed_b", [False, True])
@pytest.mark.parametrize("size", [SMALL, LARGE, TALL, ODD], ids=str)
def test_add_matmul_adds(size, transposed_a, transposed_b):
    a, b = factors(size, transposed_a, transposed_b)
    total = numbers(3, size[0], size[2])
    expected = total.double() + a.double() @ b.double()
    address = total.data_ptr()
    add_matmul(total, a, b)
    assert total.data_ptr() == address
    torch.testing.assert_close(total.double(), expected, **TOLERANCE)


@pytest.mark.parametrize("size", [SMALL, LARGE, TALL], ids=str)
def test_add_matmul_into_a_view_of_a_buffer(size):
    """A main gradient is a part of a flat bucket; the parts next to it don't change."""
    m, _, n = size
    bucket = torch.zeros(m * n + 20)
    a, b = factors(size, True, False)
    add_matmul(bucket[10:-10].view(m, n), a, b)
    torch.testing.assert_close(bucket[10:-10].view(m, n).double(), a.double() @ b.double(), **TOLERANCE)
    assert not bucket[:10].any() and not bucket[-10:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_formats_go_torchs_way(dtype, onednn_calls):
    a, b = factors(LARGE, False, True, dtype)
    assert torch.equal(matmul(a, b), a @ b)
    total = numbers(3, LARGE[0], LARGE[2], dtype=dtype)
    expected = torch.addmm(total, a, b)
    add_matmul(total, a, b)
    assert torch.equal(total, expected)
    assert onednn_calls and not any(onednn_calls)


def test_bf16_products_are_added_up_in_fp32():
    a, b = factors(LARGE, True, False, torch.bfloat16)
    total = torch.full((LARGE[0], LARGE[2]), 1000.0)
    add_matmul(total, a, b)
    assert total.dtype is torch.float32
    assert torch.equal(total, 1000.0 + (a @ b).float())


@pytest.mark.parametrize("size", [(0, 16, 8), (4, 16, 0), (0, 0, 0)], ids=str)
def test_empty_products(size):
    """A rank whose part of the vocabulary is padding has a product without columns."""
    a, b = factors(size, False, True)
    assert matmul(a, b).shape == (size[0], size[2])
    add_matmul(torch.zeros(size[0], size[2]), a, b)


def test_a_product_over_nothing_is_zero():
    a, b = factors((4, 0, 6), False, False)
    assert torch.equal(matmul(a, b), torch.zeros(4, 6))
    total = torch.ones(4, 6)
    add_matmul(total, a, b)
    assert torch.equal(total, torch.ones(4, 6))


@pytest.mark.parametrize("size", [SMALL, LARGE, ODD])
def test_fp16_products_are_fp32_products_rounded_once(size):
    a, b = factors(size, True, False, dtype=torch.float16)
    product = matmul(a, b)
    assert product.dtype is torch.float16 and torch.equal(product, matmul(a.float(), b.float()).half())
    total = torch.zeros(size[0], size[2])
    add_matmul(total, a, b)
    assert torch.equal(total, product.float())


@pytest.mark.parametrize("is_out_given", [False, True])
@pytest.mark.parametrize("size", [SMALL, LARGE, ODD])
def test_products_of_widened_factors_are_rounded_once(size, is_out_given):
    a, b = factors(size, True, False, dtype=torch.bfloat16)
    exact, out = a.float() @ b.float(), torch.empty(size[0], size[2], dtype=torch.bfloat16) if is_out_given else None
    product = matmul(a, b, "widened", out=out)
    assert product.dtype is torch.bfloat16 and torch.equal(product, exact.bfloat16())
    assert out is None or product is out
    total = torch.full((size[0], size[2]), 3.0)
    add_matmul(total, a, b, "widened")
    torch.testing.assert_close(total, exact + 3, **TOLERANCE)  # not rounded: bf16's steps are 4e-3 of a number
    narrow = torch.zeros(size[0], size[2], dtype=torch.bfloat16)
    add_matmul(narrow, a, b, "widened")
    assert torch.equal(narrow, exact.bfloat16())
    add_matmul(narrow.fill_(3.0), a, b, "widened")
    assert torch.equal(narrow, (exact + 3).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_factors_are_not_widened(dtype):
    a, b = factors(LARGE, True, False, dtype)
    assert torch.equal(matmul(a, b, "widened"), a @ b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_wide_products_are_not_rounded_before_they_are_added(dtype):
    a, b = factors(LARGE, True, False, dtype=dtype)
    exact = a.double() @ b.double()
    wide, narrow = torch.zeros(LARGE[0], LARGE[2]), torch.zeros(LARGE[0], LARGE[2])
    add_matmul(wide, a, b, wide=True)
    add_matmul(narrow, a, b)
    torch.testing.assert_close(wide.double(), exact, **TOLERANCE)
    assert (narrow - exact).abs().max() > 100 * (wide - exact).abs().max()


@pytest.mark.parametrize("size", [SMALL, LARGE, TALL], ids=str)
@pytest.mark.parametrize(
    "total_dtype, dtype", [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2], ids=str
)
def test_overwriting_forgets_what_was_there(size, total_dtype, dtype):
    a, b = factors(size, True, False, dtype)
    total = torch.full((size[0], size[2]), float("nan"), dtype=total_dtype)
    zeros = torch.zeros_like(total)
    add_matmul(total, a, b, overwrite=True)
    add_matmul(zeros, a, b)
    assert torch.equal(total, zeros)


@pytest.mark.skipif(not has_tiles(), reason="no AMX")
@pytest.mark.parametrize(
    "num_tokens, num_out, num_in",
    [(1, 32, 32), (63, 96, 64), (700, 64, 512), (40, 688, 20), (63, 97, 65), (33, 64, 47), (5, 7, 3)],
)
def test_tiles_add_a_weight_gradient_in_fp32(num_tokens, num_out, num_in, monkeypatch):
    """Whatever the number of threads, of views, and of tokens at a time: the same bits; and no rounding to bf16."""
    numbers, num_threads = torch.Generator().manual_seed(1), torch.get_num_threads()
    grad, x = (torch.randn(num_tokens, size + 8, generator=numbers).bfloat16()[:, 4:-4] for size in (num_out, num_in))
    exact, found = grad.double().t() @ x.double(), []
    for threads, chunk_bytes in ((1, 1 << 19), (3, 1 << 19), (2, 1)):
        monkeypatch.setattr(c_weight_grad, "_CHUNK_BYTES", chunk_bytes)
        torch.set_num_threads(threads)
        try:
            memory = torch.full((num_out * num_in + 64,), float("nan"))
            total = memory[: num_out * num_in].view(num_out, num_in)
            Gemm(default="tiles").add_weight_grad(total, grad, x, overwrite=True)
            assert (total - exact).norm() < 1e-6 * exact.norm()
            Gemm(default="tiles").add_weight_grad(total, grad, x)
            assert memory[num_out * num_in :].isnan().all()
        finally:
            torch.set_num_threads(num_threads)
        found.append(total)
    assert (found[0] - 2 * exact).norm() < 1e-6 * exact.norm()
    assert all(torch.equal(total, found[0]) for total in found[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_does_not_fit_tiles_is_added_as_by_torch(dtype):
    numbers = torch.Generator().manual_seed(1)
    grad, x = (torch.randn(60, 32, generator=numbers).to(dtype) for _ in range(2))
    totals = [torch.ones(32, 32) for _ in range(2)]
    for total, library in zip(totals, ("tiles", "mkl")):
        Gemm(default=library).add_weight_grad(total, grad, x)
    assert torch.equal(*totals) and not torch.equal(totals[0], torch.ones(32, 32))


@pytest.mark.parametrize("overwrite", [False, True])
def test_on_a_device_products_of_narrow_factors_are_added_without_a_temporary(overwrite):
    a, b = (torch.empty(64, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    total = torch.empty(64, 64, device="meta")
    with LiveBytes() as created:
        add_matmul(total, a, b, overwrite=overwrite)
    assert created.peak == 0


@pytest.mark.parametrize("is_device", [False, True])
def test_the_bias_is_added_to_the_product(monkeypatch, is_device):
    """Within it, on a device."""
    a, b = factors(SMALL, False, True, torch.float64)
    bias = torch.arange(b.shape[1], dtype=torch.float64)
    monkeypatch.setattr(gemm, "is_accelerator", lambda device: is_device)
    torch.testing.assert_close(gemm.Gemm().forward(a, b.t(), bias), a @ b + bias, rtol=1e-13, atol=1e-13)
    out = torch.full((a.shape[0], b.shape[1]), float("nan"), dtype=torch.float64)
    assert gemm.Gemm().forward(a, b.t(), bias, out=out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, a @ b + bias, rtol=1e-13, atol=1e-13)
