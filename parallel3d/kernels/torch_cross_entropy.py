"""The cross-entropy of logits over a sharded vocabulary, and its gradient, as torch operators: the definition.

The softmax needs two reductions over the group that shares the vocabulary (Megatron-LM, section 3): the largest logit,
and the sum of exponentials together with the target's logit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.parallel.group import Group

LOGITS_ALIGNMENT = 64
"""On an accelerator rows of logits begin at multiples of this many elements."""


def cross_entropy(
    logits: Tensor, local_targets: Tensor, group: Group, grad_factor: float | None, wide_dtype: torch.dtype
) -> Tensor:
    """Token losses (rows,) in `wide_dtype`. `logits` (rows, vocab_local) may be overwritten: with a `grad_factor` by
    the gradient of the losses' sum times that factor, softmax - one_hot.

    `local_targets` (rows,) are numbered from this rank's first logit; those of other ranks are negative or too large.
    """
    wide = logits.to(wide_dtype)
    losses = _loss_and_grad(wide, local_targets, group)
    if grad_factor:
        scaled = wide if grad_factor == 1.0 else wide.mul_(grad_factor)
        if scaled is not logits:
            logits.copy_(scaled)
    return losses


def _loss_and_grad(logits: Tensor, local_targets: Tensor, group: Group) -> Tensor:
    """Token losses (rows,); `logits` (rows, vocab_local) becomes softmax - one_hot, the gradient of their sum."""
    num_rows, num_local = logits.shape
    largest = logits.amax(1, keepdim=True) if num_local else logits.new_full((num_rows, 1), float("-inf"))
    group.all_reduce_max(largest)
    logits -= largest
    elsewhere = (local_targets < 0) | (local_targets >= num_local)
    index = local_targets.masked_fill(elsewhere, 0)
    stats = logits.new_zeros((2, num_rows))
    if num_local:
        stats[0] = logits.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill_(elsewhere, 0)
        logits.exp_()
        torch.sum(logits, 1, out=stats[1])
    group.all_reduce(stats)
    target_logit, total = stats[0], stats[1]
    logits /= total.unsqueeze(1)
    if num_local:
        logits[torch.arange(num_rows, device=logits.device), index] -= (~elsewhere).to(logits.dtype)
    return total.log() - target_logit
