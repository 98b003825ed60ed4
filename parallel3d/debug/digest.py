"""Computes a 64-bit digest of a tensor's bits, on its device.

The bytes are read as 64-bit words; word i adds bits(key, word ^ bits(salt, i)) modulo 2**64, `bits` being the mixing
function of random_keys. One different word always changes the digest, since `bits` is a bijection; several leave it
unchanged with a probability of about 2**-64. It is a sum, so the chunk size does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from parallel3d.random_keys import bits, key_of

CHUNK_WORDS = 1 << 16
"""Words at a time: half a megabyte, which stays in the cache through the dozen passes of the mixing."""
_MASK = (1 << 64) - 1


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> int:
    """The digest of some tensors, in order, 0 to 2**64 - 1."""
    total = 0
    for number, tensor in enumerate(tensors):
        total += _digest_one(tensor, number)
    return total & _MASK


def _digest_one(tensor: Tensor, number: int) -> int:
    words = _words(tensor)
    total, salts = words.new_zeros(()), _salts(tensor.device)
    for start in range(0, len(words), CHUNK_WORDS):
        part = words[start : start + CHUNK_WORDS]
        total += bits(key_of("digest", number, start), part ^ salts[: len(part)]).sum()
    return int(total.item())  # the only synchronisation with the device


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as int64 (words,), padded with zeros."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    missing = -len(flat) % 8
    if missing or flat.data_ptr() % 8:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(torch.int64)


@cache
def _salts(device: torch.device) -> Tensor:
    return bits(key_of("digest", "salts"), torch.arange(CHUNK_WORDS, device=device))
