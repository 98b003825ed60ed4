"""Random numbers: pinned, independent of who asks, distributed as they should be."""

import itertools
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.random_keys import Key, bits, keep_mask, key_of, normal

KEY = key_of("init", 17, "layers.3.mlp.down.weight")
NUM = 1 << 20
INT64 = st.integers(-(2**63), 2**63 - 1)


def reference_bits(key, index):
    """The formula of the module in Python's unlimited integers."""
    mask = (1 << 64) - 1
    x = (index * 0x9E3779B97F4A7C15 + key.first) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x ^= key.second & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def test_known_answers():
    """Another generator is another model: these numbers may never change."""
    key = key_of("init", 17, "w")
    index = torch.tensor([0, 1, 2, 12345678901234, -1])
    assert key == Key(6527385156524154965, -6129533057407877854)
    assert bits(key, index).tolist() == [
        -1878120230168467555,
        -3604673781757714487,
        -280584620633594697,
        6184592689049672780,
        1692127250124587023,
    ]
    words = ["0x1.fe1224p-1", "0x1.29b474p-2", "-0x1.af5dd8p-1", "0x1.fde91p-3", "0x1.87f548p-4"]
    assert normal(key, index).tolist() == [float.fromhex(word) for word in words]
    assert keep_mask(key, index, 0.3).tolist() == [True, False, False, True, True]


@given(INT64, INT64, st.lists(INT64, min_size=1, max_size=20))
def test_arithmetic_wraps_like_unsigned_words(first, second, indices):
    key = Key(first, second)
    assert bits(key, torch.tensor(indices)).tolist() == [reference_bits(key, index) for index in indices]


def test_who_asks_for_what_in_which_order_changes_nothing():
    index = torch.arange(5000) + 2**40
    whole = normal(KEY, index)
    shuffled = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(normal(KEY, index[shuffled]), whole[shuffled])
    assert torch.equal(torch.cat([normal(KEY, part) for part in index.split(37)]), whole)
    assert torch.equal(normal(KEY, index.view(50, 100)[3:40:2, 10:90].t()), whole.view(50, 100)[3:40:2, 10:90].t())
    assert torch.equal(normal(KEY, index[1234]), whole[1234])


def test_the_moments_are_the_normals():
    x = normal(KEY, torch.arange(NUM)).double()
    sd = NUM**-0.5  # of the mean; of the higher moments: sqrt(2), sqrt(15), sqrt(96) times as much
    assert abs(x.mean()) < 4 * sd
    assert abs(x.square().mean() - 1) < 4 * 2**0.5 * sd
    assert abs(x.pow(3).mean()) < 4 * 15**0.5 * sd
    assert abs(x.pow(4).mean() - 3) < 4 * 96**0.5 * sd
    assert x.abs().max() < 6.2


@pytest.mark.parametrize("bound", [-2.0, -1.0, 0.0, 0.5, 1.5, 3.0])
def test_the_tails_are_the_normals(bound):
    mass = NormalDist().cdf(bound)
    found = (normal(KEY, torch.arange(NUM)) < bound).double().mean().item()
    assert abs(found - mass) < 4 * (mass * (1 - mass) / NUM) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 64, 1024])
def test_neighbours_are_independent(lag):
    x = normal(KEY, torch.arange(NUM)).double()
    assert abs((x[lag:] * x[:-lag]).mean()) < 4 * NUM**-0.5


def test_keys_are_independent_streams():
    keys = [key_of("init", 17, "a"), key_of("init", 17, "b"), key_of("init", 18, "a"), key_of("drop", 17, "a")]
    keys += [Key(keys[0].first, keys[1].second), Key(keys[1].first, keys[0].second)]  # one word of each
    streams = [normal(key, torch.arange(NUM)).double() for key in keys]
    for one, two in itertools.combinations(streams, 2):
        assert abs((one * two).mean()) < 4.5 * NUM**-0.5  # 15 pairs
        assert (one == two).double().mean() < 1e-3


def test_a_second_word_keeps_streams_from_walking_through_one_another():
    """With one word alone, a key that is a multiple of the increment away gives the same sequence, shifted."""
    gamma = 0x9E3779B97F4A7C15 - (1 << 64)
    one, two = bits(Key(5, 1), torch.arange(1000)), bits(Key(5 - gamma, 2), torch.arange(1000))
    assert not torch.isin(one, two).any()


def test_keys_come_from_every_part():
    parts = [("a", 1), ("a", "1"), ("a1",), ("a", 1, 0), ("1", "a"), (1, "a")]
    assert len({key_of(*p) for p in parts}) == len(parts)
    assert key_of("a", 1) == key_of("a", 1)


@pytest.mark.parametrize("drop", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_keep_mask_drops_at_the_given_rate(drop):
    kept = keep_mask(KEY, torch.arange(NUM), drop)
    assert kept.dtype is torch.bool
    assert abs(1 - kept.double().mean() - drop) <= 4 * (drop * (1 - drop) / NUM) ** 0.5


def test_a_higher_rate_drops_the_same_and_more():
    index = torch.arange(10_000)
    assert not (keep_mask(KEY, index, 0.3) & ~keep_mask(KEY, index, 0.2)).any()


def test_torchs_own_generator_is_left_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    index = torch.arange(1000)
    first = normal(KEY, index)
    keep_mask(KEY, index, 0.5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(normal(KEY, index), first)
