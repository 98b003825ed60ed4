"""Chooses the next tokens from logits: the likeliest, or drawn by temperature, top-k and top-p.

A draw is a function of (seed, prompt, number of the sample, position in the text): of nothing that the layout, the
batch or the other prompts decide. Only the rounding of logits, whose sums are taken in other orders, is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.random_keys import Key, bits, key_of


@dataclass(frozen=True, kw_only=True)
class SamplingRule:
    """How tokens are chosen, in this order: temperature, top-k, top-p."""

    temperature: float = 0.0
    """Divides the logits; 0: the likeliest token."""
    top_k: int | None = None
    """Tokens that may be chosen, the likeliest; equals of the last of them too."""
    top_p: float = 1.0
    """The likeliest tokens are kept until their probabilities add up to this."""
    seed: int = 0

    def key(self, prompt: Sequence[int], sample: int) -> Key:
        """The key of all draws of one text."""
        return key_of("text", self.seed, sample, *prompt)


@torch.no_grad()
def choose_tokens(
    logits: Tensor, rule: SamplingRule, keys: Sequence[Key], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """logits (rows, vocab) -> ids (rows,) int64 and the logarithms of their probabilities (rows,) float64.

    The latter are those of the model: without temperature, top-k and top-p.
    """
    ids = logits.argmax(-1) if rule.temperature == 0 else _draw(logits, rule, keys, positions)
    chosen = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
    return ids, chosen.double() - logits.logsumexp(-1).double()


def _draw(logits: Tensor, rule: SamplingRule, keys: Sequence[Key], positions: Sequence[int]) -> Tensor:
    cumulative = token_probabilities(logits, rule).cumsum(-1)
    draws = torch.tensor([[uniform(key, position)] for key, position in zip(keys, positions, strict=True)])
    targets = draws.to(cumulative.device).to(cumulative.dtype) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)


def token_probabilities(logits: Tensor, rule: SamplingRule) -> Tensor:
    """The probabilities (rows, vocab) float64 with which tokens are drawn; they add up to 1 but for rounding."""
    scaled = logits.double() / rule.temperature
    if rule.top_k is not None and rule.top_k < scaled.shape[-1]:
        least = scaled.topk(rule.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    probabilities = torch.softmax(scaled, -1)
    if rule.top_p < 1:
        ranked, order = probabilities.sort(stable=True, dim=-1, descending=True)
        before = ranked.cumsum(-1) - ranked
        ranked = ranked.masked_fill(before >= rule.top_p, 0.0)
        ranked[:, 0] = probabilities.gather(1, order[:, :1]).squeeze(1)  # the likeliest is always kept
        probabilities = torch.zeros_like(probabilities).scatter_(1, order, ranked)
        probabilities /= probabilities.sum(-1, keepdim=True)
    return probabilities


def uniform(key: Key, position: int) -> float:
    """A number in [0, 1) of 32 bits."""
    return (int(bits(key, torch.tensor([position]))) & 0xFFFFFFFF) / 2**32
