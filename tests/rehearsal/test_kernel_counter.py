"""Kernels, bytes and FLOPs of single operators on meta tensors."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from parallel3d.kernels.launch_kernel import launch_triton
from parallel3d.parallel.staged_group import HostCopy
from parallel3d.rehearsal.kernel_counter import KernelCounter


def count(function, *shapes, dtype=torch.bfloat16):
    """The counts of function(meta tensors of these shapes)."""
    counter = KernelCounter()
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    with counter.counting():
        function(*tensors)
    return counter.counts.get("")


N = 1000
ELEMENTWISE = {
    "sum of two": (lambda a, b: a + b, [(N,), (N,)], 6 * N),
    "in place": (lambda a, b: a.add_(b), [(N,), (N,)], 6 * N),
    "copy": (lambda a, b: a.copy_(b), [(N,), (N,)], 4 * N),
    "zero": (lambda a: a.zero_(), [(N,)], 2 * N),
    "to fp32": (lambda a: a.float(), [(N,)], 6 * N),
    "out=": (lambda a, b: torch.add(a, a, out=b), [(N,), (N,)], 6 * N),
    "a repeated dimension": (lambda a, b: a + b.expand(4, N), [(4, N), (N,)], 18 * N),
    "rows by index": (lambda a: a[torch.zeros(3, dtype=torch.int64, device="meta")], [(N, 8)], 2 * 48 + 24),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_bytes(name):
    function, shapes, num_bytes = ELEMENTWISE[name]
    counts = count(function, *shapes)
    # an index is filled first
    assert counts.elementwise_bytes - (24 if "index" in name else 0) == num_bytes
    assert counts.num_kernels == (2 if "index" in name else 1)


def test_views_and_allocations_are_no_kernels():
    assert count(lambda a: a.view(-1).t().unsqueeze(0).expand(3, -1, -1).detach(), (4, 5)) is None
    assert count(lambda a: (torch.empty_like(a), a.new_empty(3), a.split(2)), (4, 5)) is None


def test_products():
    [(work, number)] = count(lambda a, b: a @ b.t(), (64, 768), (128, 768)).works.items()
    assert (work.kind, work.flops, work.narrowest, work.is_aligned) == ("product", 2 * 64 * 768 * 128, 64, True)
    assert number == 1 and work.num_bytes == 2 * (64 * 768 + 128 * 768 + 64 * 128)
    [work] = count(lambda a, b: a @ b.t(), (64, 768), (50257, 768)).works
    assert not work.is_aligned  # rows of 50,257 results
    [work] = count(lambda total, a, b: torch.addmm(total, a, b, out=total), (8, 8), (8, 16), (16, 8)).works
    assert work.flops == 2 * 8 * 16 * 8 and work.num_bytes == 2 * (64 + 128 + 128 + 64)


def test_products_of_16_bits_into_32():
    def add(a, b):
        total = torch.empty(8, 8, device="meta")
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        torch.mm(a, b, out_dtype=torch.float32)

    counts = count(add, (8, 16), (16, 8))
    assert counts.flops("product") == 2 * 2 * 8 * 16 * 8 and {work.itemsize for work in counts.works} == {2}


def test_attention_is_cudas_and_causal():
    def attend(q, k, v):
        for each in (q, k, v):
            each.requires_grad_()
        scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    counts = count(attend, *[(2, 4, 128, 64)] * 3)
    forward = 4 * 2 * 4 * 128 * 128 * 64 // 2
    assert counts.flops("attention") == forward and counts.flops("attention_backward") == 5 * forward // 2


def test_a_read_of_the_host_counts_and_a_hidden_one_is_an_error():
    assert count(lambda a: HostCopy(a.sum()).read(), (N,)).num_waits == 1
    with pytest.raises(RuntimeError):
        count(lambda a: a.sum().item(), (N,))


def test_a_triton_kernel_counts_what_it_moves():
    def add_rows():
        pass

    kernel = SimpleNamespace(fn=add_rows)
    counts = count(lambda a, b: launch_triton(kernel, (1,), [], reads=[a, a], writes=[b]), (N,), (2, N))
    [work] = counts.works
    assert work.name == "add_rows" and work.num_bytes == 2 * (N + N + 2 * N)


def test_labels_keep_parts_apart_and_counts_can_be_added():
    counter = KernelCounter()
    a = torch.empty(N, device="meta")
    with counter.counting():
        counter.label = "one"
        a.add_(1)
        counter.label = "two"
        a.add_(1)
        a.mul_(2)
    one, two = counter.counts["one"], counter.counts["two"]
    assert (one.num_kernels, two.num_kernels) == (1, 2)
    assert (one + two).num_kernels == 3 and (two - one).num_kernels == 1 and one.times(5).elementwise_bytes == 40 * N
