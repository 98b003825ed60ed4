"""Gradient sums in fixed point have the same bits in any order and partition, and err by half a unit a term."""

from fractions import Fraction
from math import fsum, inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.errors import UserError
from parallel3d.precision import exact_sums
from parallel3d.precision.exact_sums import _BLOCK, add_and_clear, sum_of_squares, write_floats
from parallel3d.precision.fixed_point import FixedPoint, plan_fixed_point

FORMATS = [torch.float32, torch.float64]
FIXED = plan_fixed_point(num_tokens=1024, num_terms=8)  # units of 2**-42, terms within +-2**17


def gradients(num_terms, length, dtype, seed=0):
    """Terms of all magnitudes, from far below the unit to near the limit, with both signs and many cancellations."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-60, 16, (num_terms, length), generator=generator)
    return (torch.randn((num_terms, length), generator=generator, dtype=torch.float64) * 2.0**exponents).to(dtype)


def total_of(terms):
    total = torch.zeros(terms.shape[1], dtype=torch.int64)
    for term in terms:
        scratch = term.clone()
        assert add_and_clear(total, scratch, FIXED)
        assert not scratch.any()
    return total


@pytest.mark.parametrize("dtype", FORMATS)
@given(st.integers(1, 8), st.integers(1, 300), st.integers(0, 2**31), st.randoms(use_true_random=False))
def test_any_order_any_owner_any_place_gives_the_same_bits(dtype, num_terms, length, seed, random):
    terms = gradients(num_terms, length, dtype, seed)
    whole = total_of(terms)
    order = random.sample(range(num_terms), num_terms)
    ranks = [order[k::3] for k in range(3)]
    cut = random.randint(0, length)
    by_ranks = sum(total_of(terms[rank]) for rank in ranks)
    by_parts = [total_of(part.contiguous()) for part in (terms[:, :cut], terms[:, cut:]) if part.numel()]
    assert torch.equal(by_ranks, whole)
    assert torch.equal(torch.cat(by_parts), whole)
    assert sum_of_squares(whole, FIXED).units == sum(sum_of_squares(part, FIXED).units for part in by_parts)
    whole_floats, part_floats = torch.empty(length, dtype=dtype), [torch.empty(len(p), dtype=dtype) for p in by_parts]
    write_floats(whole_floats, whole, FIXED)
    for values, part in zip(part_floats, by_parts):
        write_floats(values, part, FIXED)
    assert torch.equal(torch.cat(part_floats), whole_floats)


def test_floats_would_not_pass():
    """Added as floats, the sum of these terms depends on their order."""
    terms = gradients(8, 300, torch.float32)
    assert not torch.equal(sum(terms), sum(terms.flip(0)))


@pytest.mark.parametrize("dtype", FORMATS)
@given(st.integers(1, 8), st.integers(0, 2**31))
def test_sums_are_right_to_half_a_unit_a_term(dtype, num_terms, seed):
    terms = gradients(num_terms, 50, dtype, seed)
    values = torch.empty(50, dtype=torch.float64)
    write_floats(values, total_of(terms), FIXED)
    for value, column in zip(values.tolist(), terms.double().t().tolist()):
        exact = fsum(column)
        assert abs(value - exact) <= num_terms * 2.0 ** -(FIXED.shift + 1) + abs(exact) * 2.0**-52


def test_a_term_is_rounded_to_the_nearest_unit():
    unit = 2.0**-FIXED.shift
    terms = torch.tensor([[0.4 * unit, 0.6 * unit, -0.6 * unit, 1.5 * unit, -2.5 * unit, 3 * unit]])
    assert total_of(terms).tolist() == [0, 1, -1, 2, -2, 3]


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_range_is_open_to_its_end_and_closed_beyond(dtype):
    total = torch.zeros(2, dtype=torch.int64)
    for _ in range(8):
        assert add_and_clear(total, torch.tensor([FIXED.largest, -FIXED.largest], dtype=dtype), FIXED)
    assert total.tolist() == [2**62, -(2**62)]
    values = torch.empty(2, dtype=dtype)
    write_floats(values, total, FIXED)
    assert values.tolist() == [2.0**20, -(2.0**20)]
    for beyond in (FIXED.largest * 1.001, -FIXED.largest * 1.001, 1e30):
        with pytest.raises(UserError, match="precision.sums"):
            add_and_clear(total, torch.tensor([0.0, beyond], dtype=dtype), FIXED)


@pytest.mark.parametrize("strange", [inf, -inf, nan])
@pytest.mark.parametrize("length,place", [(5, 3), (2 * _BLOCK + 1, 7), (2 * _BLOCK + 1, 2 * _BLOCK)])
def test_what_is_not_finite_is_reported_and_counts_as_zero(strange, length, place):
    scratch = torch.full((length,), 0.25)
    scratch[place] = strange
    want = torch.full((length,), 2 ** (FIXED.shift - 2), dtype=torch.int64)
    want[place] = 0
    total = torch.zeros(length, dtype=torch.int64)
    assert not add_and_clear(total, scratch, FIXED)
    assert torch.equal(total, want) and not scratch.any()
    assert add_and_clear(total, scratch, FIXED)


def test_a_term_beyond_the_range_is_found_beside_an_infinity():
    with pytest.raises(UserError):
        add_and_clear(torch.zeros(2, dtype=torch.int64), torch.tensor([inf, 2 * FIXED.largest]), FIXED)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40), st.integers(0, 52))
def test_squares_are_those_of_integers(counts, shift):
    total = torch.tensor(counts, dtype=torch.int64)
    squares = sum_of_squares(total, FixedPoint(shift=shift, largest=1.0))
    assert Fraction(squares.units, 2**104) == sum(Fraction(count, 2**shift) ** 2 for count in counts)


@pytest.mark.parametrize("extreme", [2**63 - 1, -(2**63), 2**42 - 1, 2**21 - 1])
def test_squares_of_a_full_block_do_not_overflow(extreme):
    total = torch.full((_BLOCK + 3,), extreme, dtype=torch.int64)
    assert sum_of_squares(total, FixedPoint(shift=52, largest=1.0)).units == len(total) * extreme**2


def test_norms_of_all_magnitudes():
    """1e-12 is 4.4 units of 2**-42, so its square is 17 % off; 1e5 is near the range's end, its square far from one."""
    for magnitude, tolerance in ((1e-12, 0.2), (1e-9, 1e-3), (1e-3, 1e-9), (1e5, 1e-12)):
        total = total_of(torch.full((1, 1000), magnitude, dtype=torch.float64))
        assert sum_of_squares(total, FIXED).value == pytest.approx(1000 * magnitude**2, rel=tolerance)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_and_addresses_change_nothing(num_threads):
    terms = gradients(2, 3 * _BLOCK, torch.float32)
    want, want_floats = total_of(terms), torch.empty(3 * _BLOCK)
    write_floats(want_floats, want, FIXED)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for shift in (1, 3, 8):
            totals = total_of(terms[:, shift:])
            assert torch.equal(totals, want[shift:])
            floats = torch.empty(3 * _BLOCK)[shift:]
            write_floats(floats, want[shift:], FIXED)
            assert torch.equal(floats, want_floats[shift:])
    finally:
        torch.set_num_threads(before)


def test_blocks_of_a_device_give_the_same(monkeypatch):
    """A large block with a tail, whose products would overflow if they were added up as one."""
    terms = gradients(2, 5 * _BLOCK + 3, torch.float64)
    small = total_of(terms)
    expected = torch.empty(len(small), dtype=torch.float64)
    write_floats(expected, small, FIXED)
    squares = sum_of_squares(small, FIXED)
    monkeypatch.setattr(exact_sums, "_blocks", lambda flat: flat.split(1 << 24))
    large, floats = total_of(terms), torch.empty(len(small), dtype=torch.float64)
    write_floats(floats, large, FIXED)
    assert torch.equal(large, small) and torch.equal(floats, expected)
    assert sum_of_squares(large, FIXED) == squares
    limit = torch.full((3 * _BLOCK,), 2**62, dtype=torch.int64)
    assert sum_of_squares(limit, FIXED).units == sum(sum_of_squares(part, FIXED).units for part in limit.split(_BLOCK))
