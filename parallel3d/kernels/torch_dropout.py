"""Dropout by keys, as torch operators: the definition. The other form gives the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.random_keys import Key, keep_mask


@dataclass(frozen=True, kw_only=True)
class DropoutMask:
    """The elements that are dropped from a rank's tokens (tokens_local, hidden) of one micro-batch.

    Element c of the token at position p of its sequence draws bits number p * hidden + c of the sequence's key.
    """

    keys: tuple[Key, ...]
    """By sequence of the micro-batch."""
    sequence_length: int
    first_token: int
    """Number of the rank's first token in the micro-batch."""
    probability: float

    @property
    def scale(self) -> float:
        """Multiplies the elements that are kept."""
        return 1.0 / (1.0 - self.probability)


def drop(x: Tensor, mask: DropoutMask) -> tuple[Tensor, Tensor]:
    """x (tokens_local, hidden) with dropped elements; the elements kept (bool), for the backward pass."""
    keep = _kept(x, mask)
    return (x * keep).mul_(mask.scale), keep


def drop_grad(grad: Tensor, mask: DropoutMask, keep: Tensor) -> Tensor:
    """The gradient of x."""
    return (grad * keep).mul_(mask.scale)


def _kept(x: Tensor, mask: DropoutMask) -> Tensor:
    num_local, hidden = x.shape
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    columns, begin = torch.arange(hidden, device=x.device), mask.first_token
    for number, key in enumerate(mask.keys):
        start = number * mask.sequence_length
        first, last = max(begin, start), min(begin + num_local, start + mask.sequence_length)
        if first < last:
            rows = torch.arange(first - start, last - start, device=x.device)
            keep[first - begin : last - begin] = keep_mask(key, rows[:, None] * hidden + columns, mask.probability)
    return keep
