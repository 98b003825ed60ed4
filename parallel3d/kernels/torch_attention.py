"""The parts of causal attention by blocks of queries as torch operators: the definition.

Scores (units, rows, keys) are those of the last `num_queries` of the keys' positions; the rows of a unit are those
queries, once for each head of its group. A query sees the keys up to its own position.
"""

from __future__ import annotations

import torch
from torch import Tensor


def prepare_keys(keys: Tensor) -> Tensor:
    """keys (units, seq, size), or values, as `multiply_rows` wants them: at least in fp32."""
    return _wide(keys)


def multiply_rows(rows: Tensor, prepared: Tensor, units: slice, end: int, scale: float) -> Tensor:
    """rows (some units, rows, size) times the first `end` keys of those units, in fp32 or wider."""
    wide = _wide(rows)
    return torch.bmm(wide if scale == 1.0 else wide * scale, prepared[units, :end].transpose(1, 2))


def causal_softmax(scores: Tensor, num_queries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The probabilities of each row's keys in the scores' format, and rounded to `dtype`. May overwrite the scores."""
    num_units, num_rows, num_keys = scores.shape
    later = scores.new_full((num_queries, num_queries), float("-inf")).triu_(1)
    by_query = scores.view(num_units, num_rows // num_queries, num_queries, num_keys)
    by_query[..., num_keys - num_queries :].add_(later)
    probabilities = torch.softmax(scores, -1)
    return probabilities, probabilities.to(dtype)


def softmax_grads(grad: Tensor, probabilities: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the scores, rounded to `dtype`: p (g - sum(p g))."""
    return torch._softmax_backward_data(grad, probabilities, -1, grad.dtype).to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x
