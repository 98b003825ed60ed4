"""Stochastic rounding is right for every bit pattern and unbiased, and its noise is uncorrelated.

The statistics have fixed keys, so that they are the same in every run. Each limit is 5 standard errors:
with random keys, one in 1.7 million would fail by chance. A bias of a hundredth of the distance between neighbours
fails all of them (`test_a_small_bias_would_be_seen`).
"""

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.precision.stochastic_rounding import add_rounded, noise_of, round_in_place, round_to_bf16
from parallel3d.random_keys import bits, key_of

NUM = 200_000
LARGEST = torch.finfo(torch.bfloat16).max


def noise(name: str, index: torch.Tensor, part: int = 0, iteration: int = 1) -> torch.Tensor:
    return noise_of(bits(key_of("update", 7, iteration, name), index), part)


def from_bits(patterns) -> torch.Tensor:
    """fp32 numbers from bit patterns below 2**32."""
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def to_bits(narrow: torch.Tensor) -> torch.Tensor:
    return narrow.view(torch.int16).to(torch.int64) & 0xFFFF


# --- bits -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 0xFFFF)), min_size=1, max_size=50))
def test_every_bit_pattern_is_rounded_by_its_carry(drawn):
    """The formula in Python's integers: magnitude plus noise, upper half; NaN apart."""
    patterns, noises = zip(*drawn)
    got = to_bits(round_to_bf16(from_bits(patterns), torch.tensor(noises, dtype=torch.int32))).tolist()
    for pattern, added, result in zip(patterns, noises, got):
        sign, magnitude = pattern & 0x8000_0000, pattern & 0x7FFF_FFFF
        expected = 0x7FC0 if magnitude > 0x7F80_0000 else (sign + magnitude + added) >> 16
        assert result == expected


@pytest.mark.parametrize("added", [0, 1, 0x7FFF, 0xFFFF])
def test_what_bf16_has_stays_as_it_is(added):
    """All 65,536 bit patterns, subnormals, zeros of both signs and infinities included; a NaN stays one."""
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    rounded = round_to_bf16(every.float(), torch.full((1 << 16,), added, dtype=torch.int32))
    is_nan = every.isnan()
    assert torch.equal(rounded.isnan(), is_nan)
    assert torch.equal(rounded.view(torch.int16)[~is_nan], every.view(torch.int16)[~is_nan])


def test_a_number_in_between_goes_to_one_of_its_neighbours():
    """One in each exponent, subnormals and the step to the next power of two included, both signs."""
    lower = (torch.arange(0, 255).mul(128) + 127).repeat_interleave(2)  # the last number before a power of two
    lower[::2] -= 60
    x = from_bits(((lower << 16) + 0x4000).tolist())
    down, up = (round_to_bf16(x, torch.full(x.shape, added, dtype=torch.int32)) for added in (0xBFFF, 0xC000))
    assert torch.equal(to_bits(down), lower) and torch.equal(to_bits(up), lower + 1)
    for added in (0xBFFF, 0xC000):
        noises = torch.full(x.shape, added, dtype=torch.int32)
        assert torch.equal(round_to_bf16(-x, noises), -round_to_bf16(x, noises))


def test_beyond_the_largest_number_is_infinity():
    top = from_bits([0x7F7F_8000, 0x7F7F_FFFF, 0xFF7F_FFFF])
    rounded = [round_to_bf16(top, torch.full((3,), added, dtype=torch.int32)).tolist() for added in (0, 0xFFFF)]
    assert rounded == [[LARGEST, LARGEST, -LARGEST], [inf, inf, -inf]]
    assert round_to_bf16(torch.tensor([inf, -inf]), torch.tensor([0xFFFF] * 2, dtype=torch.int32)).tolist() == [
        inf,
        -inf,
    ]


def test_no_nan_turns_into_a_number():
    """NaNs whose bits a carry would change: payload in the lower half only, and all ones."""
    odd = from_bits([0x7F80_0001, 0x7FFF_FFFF, 0xFF80_0001, 0xFFFF_FFFF])
    for added in (0, 1, 0xFFFF):
        assert round_to_bf16(odd, torch.full((4,), added, dtype=torch.int32)).isnan().all()
    assert round_to_bf16(torch.tensor([nan]), torch.tensor([3], dtype=torch.int32)).isnan().all()


@pytest.mark.parametrize("index", [0, 5, 9_999])
def test_one_nan_among_many_numbers_is_seen(index):
    """Also among large numbers and infinities, whose sum does not show it."""
    x = torch.full((10_000,), 3e38)
    x[7] = inf
    noises = torch.full((10_000,), 0xFFFF, dtype=torch.int32)
    assert not round_to_bf16(x, noises).isnan().any()
    x.view(torch.int32)[index] = 0x7FFF_FFFF
    assert round_to_bf16(x, noises).isnan().nonzero().tolist() == [[index]]


def test_the_processors_treatment_of_subnormals_does_not_matter():
    x = from_bits([0x0000_8000, 0x0001_4000, 0x8000_8000])
    added = torch.tensor([0x8000, 0x4000, 0x8000], dtype=torch.int32)
    expected = round_to_bf16(x, added).view(torch.int16)
    assert torch.set_flush_denormal(True)
    try:
        assert torch.equal(round_to_bf16(x, added).view(torch.int16), expected)
    finally:
        torch.set_flush_denormal(False)
    assert expected.tolist() == [1, 1, -(1 << 15) + 1]


# --- statistics -------------------------------------------------------------------------------------------------------


def standard_errors(value: float, *, part: int = 0, bias: float = 0.0) -> float:
    """How far the mean of NUM roundings of `value` is from it, in standard errors; `bias` is added to the noise."""
    added = noise("w", torch.arange(NUM), part)
    rounded = round_to_bf16(torch.full((NUM,), value), (added + int(bias * 65536)).clamp(max=0xFFFF)).double()
    exact = torch.tensor(value).double()
    return ((rounded.mean() - exact) / (rounded.std() / NUM**0.5)).item()


@pytest.mark.parametrize("value", [1.001, -1.001, 1.9961, 3.2e-5, -7.7e30, 1e-40, 254.7])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_the_mean_of_many_roundings_is_the_number(value, part):
    assert abs(standard_errors(value, part=part)) < 5


def test_a_small_bias_would_be_seen():
    """1.001 lies 0.128 of the way between its neighbours; a hundredth of the way is 13 standard errors."""
    assert standard_errors(1.001, bias=0.01) > 8


def test_the_mean_of_roundings_of_1_001():
    rounded = round_to_bf16(torch.full((NUM,), 1.001), noise("w", torch.arange(NUM))).double()
    assert rounded.mean().item() == pytest.approx(1.001, abs=5 * 0.0026 / NUM**0.5)  # sd: 2**-7 x sqrt(.128 x .872)
    assert torch.tensor(1.001).bfloat16().item() == 1.0


def test_small_additions_arrive():
    """10,000 times 1e-4 on 1, whose neighbour is 7.8e-3 away: 2 on average; rounding to nearest always gives 1."""
    index = torch.arange(64)
    stochastic, nearest = torch.ones(64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    for step in range(10_000):
        stochastic = round_to_bf16(stochastic.float() + 1e-4, noise("w", index, iteration=step))
        nearest = (nearest.float() + 1e-4).bfloat16()
    assert torch.equal(nearest, torch.ones(64, dtype=torch.bfloat16))
    # Each addition has a standard deviation of sqrt(2**-7 x 1e-4), 10,000 of them 0.088, 64 averaged 0.011.
    assert stochastic.float().mean().item() == pytest.approx(2.0, abs=5 * 0.011)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()


INDEX = torch.arange(NUM)
PAIRS = {
    "neighbours": (noise("w", INDEX), noise("w", INDEX + 1)),
    "rows of 4096": (noise("w", INDEX), noise("w", INDEX + 4096)),
    "iterations": (noise("w", INDEX), noise("w", INDEX, iteration=2)),
    "weight and first moment": (noise("w", INDEX), noise("w", INDEX, 1)),
    "weight and second moment": (noise("w", INDEX), noise("w", INDEX, 2)),
    "both moments": (noise("w", INDEX, 1), noise("w", INDEX, 2)),
    "parameters": (noise("layers.0.mlp.down.weight", INDEX), noise("layers.1.mlp.down.weight", INDEX)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_noise_is_not_correlated(pair):
    """Linearly, in the size of deviations, and bit by bit: 200,000 pairs see a correlation of 0.0112."""
    a, b = PAIRS[pair]
    bound = 5 / NUM**0.5
    assert abs(correlation(a, b)) < bound
    assert abs(correlation((a - 32767.5).abs(), (b - 32767.5).abs())) < bound
    for bit in (15, 14, 0):
        assert abs(correlation((a >> bit) & 1, (b >> bit) & 1)) < bound


@pytest.mark.parametrize("part", range(4))
def test_noise_is_uniform(part):
    """Chi-square over 256 bins of each half of the 16 bits: mean 255, standard deviation 22.6."""
    added = noise("w", INDEX, part)
    assert added.dtype is torch.int32
    for digits in (added >> 8, added & 0xFF):
        counts = torch.bincount(digits, minlength=256).double()
        assert abs(((counts - NUM / 256) ** 2).sum().item() / (NUM / 256) - 255) < 5 * (2 * 255) ** 0.5


# --- sums -------------------------------------------------------------------------------------------------------------


def words(name):
    """The noise of a flat buffer."""
    return lambda span: bits(key_of("accumulation", 7, name), torch.arange(span.start, span.stop))


def test_small_terms_add_up():
    """256 times 1e-3 on 1: to nearest it stays at 1; here the sum is right on average, and the terms are zeroed."""
    stochastic, nearest = torch.ones(4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    for number in range(256):
        term = torch.full((4096,), 1e-3)
        nearest += term.bfloat16()
        add_rounded(stochastic, term, words(number))
        assert not term.any()
    assert torch.equal(nearest, torch.ones(4096, dtype=torch.bfloat16))
    # One sum has a standard deviation of sqrt(256 x 2**-7 x 1e-3) = 0.045, the mean of 4096 of 7e-4.
    assert stochastic.float().mean().item() == pytest.approx(1.256, abs=5 * 7e-4)


def test_blocks_decide_no_bit():
    """200,001 elements are more than three blocks; each is rounded by the noise of its index in the whole."""
    numbers = torch.Generator().manual_seed(2)
    term = torch.randn(200_001, generator=numbers)
    expected = round_to_bf16(term, noise_of(words("w")(range(200_001)), 0))
    rounded, total = term.clone(), torch.zeros(200_001, dtype=torch.bfloat16)
    round_in_place(rounded, words("w"))
    add_rounded(total, term, words("w"))
    assert torch.equal(rounded.bfloat16(), expected) and torch.equal(rounded, expected.float())
    assert torch.equal(total, expected)
