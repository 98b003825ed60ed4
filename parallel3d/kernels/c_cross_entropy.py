"""The cross-entropy of logits over a sharded vocabulary, and its gradient, by loops in C (`torch_cross_entropy.py`
defines them): three passes over the logits, in their own format, with the reductions in between."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.kernels import torch_cross_entropy
from parallel3d.kernels.c_loops import fits_c_loops, is_narrow, run_layer_loop
from parallel3d.parallel.group import Group


def cross_entropy(
    logits: Tensor, local_targets: Tensor, group: Group, grad_factor: float | None, wide_dtype: torch.dtype
) -> Tensor:
    """Token losses (rows,) in `wide_dtype`; with a `grad_factor` the gradient takes the logits' place."""
    if not fits_c_loops(logits, wide_dtype) or logits.stride(1) != 1:
        return torch_cross_entropy.cross_entropy(logits, local_targets, group, grad_factor, wide_dtype)
    shape = (*logits.shape, is_narrow(logits))
    begin, targets = (logits.data_ptr(), logits.stride(0)), local_targets.contiguous()
    largest = logits.new_empty(logits.shape[:1], dtype=wide_dtype)
    stats = logits.new_empty((2, logits.shape[0]), dtype=wide_dtype)
    run_layer_loop("row_max", *begin, largest, *shape)
    group.all_reduce_max(largest)
    run_layer_loop("softmax_sums", *begin, largest, targets, stats[0], stats[1], *shape)
    group.all_reduce(stats)
    if grad_factor:
        run_layer_loop("softmax_grads", *begin, largest, stats[1], targets, float(grad_factor), *shape)
    return stats[1].log() - stats[0]
