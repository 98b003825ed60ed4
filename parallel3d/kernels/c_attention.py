"""The parts of causal attention by blocks of queries, by loops in C (`torch_attention.py` defines them).

Products of bf16 factors with results in fp32, which torch has not, use the processor's instruction for them (AVX512
BF16); without it the factors are widened, and multiplied at a quarter of the speed. The softmax skips the keys that a
query does not see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.kernels import torch_attention
from parallel3d.kernels.c_loops import fits_c_loops, has_layer_loop, run_layer_loop

_TILE = 64
"""Columns that lie together in memory, pair by pair of elements; TILE of layer_loops.c."""


def prepare_keys(keys: Tensor) -> Tensor:
    """keys (units, seq, size) -> (units, tiles, size / 2, 64) of pairs, for products in bf16."""
    num_units, length, size = keys.shape
    is_bf16 = keys.dtype is torch.bfloat16 and keys.device.type == "cpu"
    if not is_bf16 or length % _TILE or size % 2 or not has_layer_loop("bf16_product"):
        return torch_attention.prepare_keys(keys)
    pairs = keys.contiguous().view(torch.int32).view(num_units, length // _TILE, _TILE, size // 2)
    return pairs.transpose(2, 3).contiguous()


def multiply_rows(rows: Tensor, prepared: Tensor, units: slice, end: int, scale: float) -> Tensor:
    """rows (some units, rows, size) times the first `end` keys of those units, in fp32."""
    num_units, num_rows, size = rows.shape
    if prepared.dtype is not torch.int32:
        return torch_attention.multiply_rows(rows, prepared, units, end, scale)
    result = rows.new_empty((num_units, num_rows, end), dtype=torch.float32)
    begin = (prepared[units].data_ptr(), prepared.stride(0))
    run_layer_loop("bf16_product", rows.contiguous(), *begin, result, scale, *result.shape, size // 2)
    return result


def causal_softmax(scores: Tensor, num_queries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The probabilities take the scores' place; in bf16 the rounded ones are a tensor of their own."""
    if not _fits(scores, dtype):
        return torch_attention.causal_softmax(scores, num_queries, dtype)
    narrow = dtype is torch.bfloat16
    rounded = torch.empty_like(scores, dtype=dtype) if narrow else scores
    num_keys = scores.shape[-1]
    run_layer_loop("causal_softmax", scores, rounded, scores.numel() // num_keys, num_keys, num_queries, int(narrow))
    return scores, rounded


def softmax_grads(grad: Tensor, probabilities: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the scores, rounded to `dtype`."""
    if not _fits(grad, dtype):
        return torch_attention.softmax_grads(grad, probabilities, dtype)
    narrow, num_keys = dtype is torch.bfloat16, grad.shape[-1]
    result = torch.empty_like(grad, dtype=dtype) if narrow else grad
    run_layer_loop("softmax_input_grads", grad, probabilities, result, grad.numel() // num_keys, num_keys, int(narrow))
    return result


def _fits(scores: Tensor, dtype: torch.dtype) -> bool:
    return fits_c_loops(scores, torch.float32) and dtype in (scores.dtype, torch.bfloat16) and scores.is_contiguous()
