"""Counter-based random numbers: a value is a function of a key and an index, not of the caller or the order of calls.

`bits(key, index)` is the SplitMix64 finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014) over `index * GAMMA + key.first`, with the second key word mixed in between its two rounds, so that the
sequences of two keys never overlap. All of it is integer arithmetic, and normal numbers are table look-ups and one
addition: the same bits on every device, thread count, shard and vector width.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

from parallel3d.compiled_loops import run_loop

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


@dataclass(frozen=True)
class Key:
    """A stream of random numbers: two signed 64-bit words, hashed by `key_of`.

    Words that differ in few bits would make correlated streams; hashes don't.
    """

    first: int
    second: int


def key_of(*parts: int | str) -> Key:
    """The key of a tuple of names and numbers, such as ("init", seed, "layers.3.mlp.down.weight")."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
    return Key(int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True))


def bits(key: Key, index: Tensor) -> Tensor:
    """64 random bits for each element of `index` (int64, any shape): int64 of the same shape."""
    if index.device.type == "cpu":
        words, index = torch.empty(index.shape, dtype=torch.int64), index.contiguous()
        if run_loop("random_words", words, index, index.numel(), key.first, key.second):
            return words
    return bits_by_operators(key, index)


def bits_by_operators(key: Key, index: Tensor) -> Tensor:
    """The same by torch's operators: the definition, and the way on devices."""
    x = index * _signed(GAMMA)
    x += key.first
    x ^= (x >> 30) & ((1 << 34) - 1)
    x *= _signed(MIX_1)
    x ^= key.second
    x ^= (x >> 27) & ((1 << 37) - 1)
    x *= _signed(MIX_2)
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def normal(key: Key, index: Tensor) -> Tensor:
    """Standard normal numbers, float32: the sum of two quantiles of 16 bits each, over sqrt(2).

    Values are exact functions of the bits, within +-6.2; the first four moments and the mass beyond 1, 2 and 3
    are the normal's to 3 digits.
    """
    words = bits(key, index)
    table = _half_normal_table(index.device)
    return table[words & 0xFFFF] + table[(words >> 16) & 0xFFFF]


def keep_mask(key: Key, index: Tensor, drop_probability: float) -> Tensor:
    """True where an element is kept (bool): each is dropped with `drop_probability`, rounded to 2**-32."""
    return (bits(key, index) & 0xFFFFFFFF) >= drop_threshold(drop_probability)


def drop_threshold(drop_probability: float) -> int:
    """The lowest 32 bits of a word below which an element is dropped."""
    return round(drop_probability * 2**32)


@cache
def _half_normal_table(device: torch.device) -> Tensor:
    """The 65,536 mid-point quantiles of N(0, 1/2), float32: two draws add up to N(0, 1)."""
    quantile = NormalDist(0.0, 0.5**0.5).inv_cdf
    upper = [quantile((32768 + i + 0.5) / 65536) for i in range(32768)]
    half = torch.tensor(upper, dtype=torch.float64)
    half *= (0.5 / half.square().mean()).sqrt()  # mid-points lose 0.003 % of the variance: restored here
    return torch.cat([-half.flip(0), half]).float().to(device)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
