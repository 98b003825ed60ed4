"""Attention within a sliding window against a plain banded mask, whole and over documents; and the memory it takes."""

import pytest
import torch
from torch.nn.attention import varlen

from parallel3d.inprocess.live_bytes import LiveBytes
from parallel3d.layers import attention
from parallel3d.layers.attention import MIN_BLOCK_WINDOW, attend, attend_per_document
from parallel3d.parallel.tensor_parallel import solo_region
from tests.support.tiny_stages import backward_twice, model_config

BATCH, SEQ, HEADS, KV_HEADS, SIZE = 2, 13, 4, 2, 8


def plain(q, k, v, window):
    """Softmax over scores with a dense mask: query i sees keys i - window + 1 to i."""
    k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for each in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / SIZE**0.5
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def draw():
    numbers = torch.Generator().manual_seed(7)
    shapes = [(BATCH, SEQ, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=numbers, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.fixture(params=["masks", "blocks"])
def _form(request, monkeypatch):
    """Both forms at a size that has a banded mask."""
    monkeypatch.setattr(attention, "MIN_BLOCK_WINDOW", {"masks": 1000, "blocks": 1}[request.param])


@pytest.mark.usefixtures("_form")
@pytest.mark.parametrize("window", [1, 2, 5, 6, 12, 13, 40])
def test_values_and_gradients_are_those_of_a_banded_mask(window):
    """fp64 rounds at 1e-16; sums of at most 13 terms are in another order."""
    ours, theirs = draw(), draw()
    mixed, expected = attend(*ours, window), plain(*theirs, window)
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-13)
    weights = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    (mixed * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, yours in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, yours.grad, rtol=0, atol=1e-13)


def flash_by_definition(q, k, v, begins, begins_k, longest, longest_k, *, window_size):
    """What torch says that `varlen_attn` does, which has no kernel for CPUs: a window is keys before and after."""
    assert torch.equal(begins, begins_k) and longest == longest_k == int(begins.diff().max())
    before, after = window_size
    assert before >= 0 and after == 0 and k.shape == v.shape == q.shape
    parts = (each.unsqueeze(0).split(begins.diff().tolist(), dim=1) for each in (q, k, v))
    return torch.cat([plain(*part, before + 1)[0] for part in zip(*parts)])


@pytest.mark.parametrize("window", [1, 5, 12])
def test_a_device_takes_each_sequence_as_a_document(window, monkeypatch):
    """No mask is made there. Only the kernel is a stand-in: `-m gpu` has it (test_on_a_device.py)."""
    monkeypatch.setattr(attention, "_has_varlen_kernel", lambda q: True)
    monkeypatch.setattr(attention, "_band_mask", None)
    monkeypatch.setattr(varlen, "varlen_attn", flash_by_definition)
    q, k, v = draw()
    torch.testing.assert_close(attend(q, k, v, window), plain(q, k, v, window), rtol=0, atol=1e-13)


@pytest.mark.usefixtures("_form")
def test_a_window_of_the_sequence_hides_nothing():
    q, k, v = draw()
    assert torch.equal(attend(q, k, v, SEQ), attend(q, k, v))
    assert not torch.allclose(attend(q, k, v, SEQ - 1), attend(q, k, v))


@pytest.mark.usefixtures("_form")
def test_a_window_ends_with_its_document():
    q, k, v = (each.detach() for each in draw())
    documents = (4, 9, 6, 7)
    mixed = attend_per_document(documents, q, k, v, 3)
    ends = [sum(documents[: n + 1]) for n in range(len(documents))]
    for length, end in zip(documents, ends):
        part = [each.flatten(0, 1)[None, end - length : end] for each in (q, k, v)]
        torch.testing.assert_close(mixed[:, end - length : end], plain(*part, 3), rtol=0, atol=1e-13)


@pytest.mark.parametrize("window", [64, 70, MIN_BLOCK_WINDOW, 330])
def test_it_is_a_banded_mask_over_several_blocks(window, monkeypatch):
    """The last two by the size of the window, the others without the bound: 400 queries are seven blocks of fp64."""
    if window < MIN_BLOCK_WINDOW:
        monkeypatch.setattr(attention, "MIN_BLOCK_WINDOW", 1)
    numbers = torch.Generator().manual_seed(7)
    shapes = [(1, 400, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, generator=numbers, dtype=torch.float64).requires_grad_() for shape in shapes)
    mixed, expected = attend(q, k, v, window), plain(q, k, v, window)
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-13)
    grad = torch.randn(mixed.shape, generator=numbers, dtype=torch.float64)
    for mine, yours in zip(*(torch.autograd.grad(each, (q, k, v), grad) for each in (mixed, expected))):
        torch.testing.assert_close(mine, yours, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_mask_of_the_window_exists(dtype):
    """At any time of a forward and a backward pass, all memory is less than a mask (w, 2 w) alone, of bytes."""
    window = 2048
    q, k, v = (torch.ones(1, 2 * window, 1, SIZE, dtype=dtype, requires_grad=True) for _ in range(3))
    with LiveBytes() as memory:
        mixed = attend(q, k, v, window)
        assert 0 < memory.peak < window * 2 * window / 2
        mixed.backward(torch.ones_like(mixed))
        assert memory.peak < window * 2 * window


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [64, 128, MIN_BLOCK_WINDOW - 1])
def test_all_blocks_share_one_mask(window, dtype):
    """A forward pass of 64 windows keeps less than 12 times what q has and three masks, of 63 blocks that have one."""
    attention._band_mask.cache_clear()
    q, k, v = (torch.ones(1, 64 * window, 1, SIZE, dtype=dtype, requires_grad=True) for _ in range(3))
    with LiveBytes() as memory:
        mixed = attend(q, k, v, window)
        assert memory.live < 12 * q.nbytes + 3 * 2 * window**2 * dtype.itemsize
        mixed.backward(torch.ones_like(mixed))


def test_a_mask_of_an_evaluation_serves_training():
    attention._band_mask.cache_clear()
    q, k, v = draw()
    with torch.inference_mode():
        evaluated = attend(q, k, v, 5)
    mixed = attend(q, k, v, 5)
    mixed.sum().backward()
    assert torch.equal(mixed, evaluated) and q.grad is not None


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_windows_are_the_same_bits(recompute, monkeypatch):
    """In blocks; masks add up in another order."""
    config = model_config(architecture="mistral", sliding_window=3, num_key_value_heads=2)
    by_masks, _ = backward_twice(config, solo_region(), False, "fp64", recompute)
    monkeypatch.setattr(attention, "MIN_BLOCK_WINDOW", 1)
    (kept, _), (found, _) = (backward_twice(config, solo_region(), False, "fp64", each) for each in ("none", recompute))
    assert [name for name in kept if not torch.equal(found[name], kept[name])] == []
    for name, expected in by_masks.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-12)
    assert not all(torch.equal(found[name], expected) for name, expected in by_masks.items()), "blocks are used"
