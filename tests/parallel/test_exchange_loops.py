"""The loops for exchanges in shared memory: the bits of torch.add, and copies of any place and size."""

import pytest
import torch

from parallel3d.compiled_loops import call_loop
from parallel3d.parallel import exchange_loops as module
from parallel3d.parallel.exchange_loops import add, copy_for_peers, has_exchange_loops

SIZES = (1, 31, 33, 8192, 8191 + 16384, 40_003)


@pytest.fixture
def called(monkeypatch):
    """The names of the loops that ran."""
    if not has_exchange_loops():
        pytest.skip("needs a C compiler")
    names = []
    monkeypatch.setattr(
        module, "call_loop", lambda library, name, *rest: names.append(name) or call_loop(library, name, *rest)
    )
    monkeypatch.setattr(module, "_LOOP_BYTES", 0)
    return names


def any_bits(*, size, seed):
    """bf16 numbers of all kinds: subnormal ones, infinities and NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (size,), generator=generator).to(torch.int16).view(torch.bfloat16)


def assert_same_bits(actual, expected):
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    assert torch.equal(actual[~nan].view(torch.int16), expected[~nan].view(torch.int16))


@pytest.mark.parametrize("threads", [1, 3])
def test_sums_have_the_bits_of_torch(threads, called, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for seed, size in enumerate((*SIZES, 1_000_000)):
        first, second = any_bits(size=size, seed=seed), any_bits(size=size, seed=seed + 100)
        expected = torch.add(first, second)
        assert_same_bits(add(first, second, out=torch.empty_like(first)), expected)
        for place in (0, 1):
            versions = [first.clone(), second.clone()]
            assert_same_bits(add(*versions, out=versions[place]), expected)
    assert called == ["add_bf16"] * 3 * (len(SIZES) + 1)


def test_sums_too_small_for_normal_numbers_are_kept(called):
    tiny = torch.tensor([2.0**-130, 2.0**-133, -(2.0**-133), 2.0**-126], dtype=torch.bfloat16)
    added = add(tiny, -2 * tiny, out=torch.empty_like(tiny))
    assert called and torch.equal(added, -tiny) and added.all()


@pytest.mark.parametrize("offset", [0, 1, 7, 63])
@pytest.mark.parametrize("threads", [1, 3])
def test_copies_of_any_size_lie_at_any_place_and_change_nothing_else(offset, threads, called, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for size in (*SIZES, 200_001):
        place, source = torch.zeros(size + 200, dtype=torch.uint8), torch.randint(1, 255, (size + 3,)).to(torch.uint8)
        copy_for_peers(place[offset : offset + size], source[3:])
        assert torch.equal(place[offset : offset + size], source[3:])
        assert not place[:offset].any() and not place[offset + size :].any()
    assert called == ["copy_for_peers"] * (len(SIZES) + 1)


def test_other_formats_little_ones_and_machines_without_a_compiler_take_torch(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "call_loop", lambda *arguments: calls.append(arguments))
    integers = torch.arange(100_000)
    assert torch.equal(add(integers, integers, out=torch.empty_like(integers)), 2 * integers)
    few = torch.arange(10).bfloat16()
    assert torch.equal(add(few, few, out=torch.empty_like(few)), 2 * few)
    monkeypatch.setattr(module, "loop_library", lambda *arguments: None)
    many, copied = integers.bfloat16(), torch.empty(100_000, dtype=torch.bfloat16)
    assert torch.equal(add(many, many, out=torch.empty_like(many)), 2 * many)
    copy_for_peers(copied, many)
    assert torch.equal(copied, many) and not calls
