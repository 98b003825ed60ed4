"""Causal attention as matrix products over blocks of queries, for CPUs, where it may be faster than torch's SDPA.

`kernels/torch_attention.py` defines it. Which form is faster depends on the machine, the format and the shape:
`worker/attention_timing.py` measures it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function

from parallel3d.kernels import torch_attention
from parallel3d.kernels.layer_kernels import TORCH_KERNELS, AttentionKernels

RunFn = Callable[[Callable[[], Tensor]], Tensor]
"""Calls a function, or returns what it returned before: `RecomputeContext.run`."""


def call(function: Callable[[], Tensor]) -> Tensor:
    return function()


def attend_with_form(q: Tensor, k: Tensor, v: Tensor, form: torch_attention.ScoreForm, *, run: RunFn = call) -> Tensor:
    """`attend_in_blocks` within a window, or of capped scores, or both; by torch's form on all devices."""
    forward = partial(torch_attention.attention, form=form)
    backward = partial(torch_attention.attention_grads, form=form)
    return attend_in_blocks(q, k, v, kernels=AttentionKernels(forward=forward, backward=backward), run=run)


def attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernels: AttentionKernels = TORCH_KERNELS.attention,
    run: RunFn = call,
) -> Tensor:
    """Causal attention: q (batch, heads, seq, size), k and v (batch, key-value heads, seq, size) -> as q.

    The backward pass needs q, k and v alone, so a layer that runs again may take its result from `run`.
    """
    grouped = q.unflatten(1, (k.shape[1], -1))  # a group of query heads belongs to each key-value head
    return _BlockAttention.apply(grouped, k, v, kernels, run).transpose(1, 2)


class _BlockAttention(Function):
    """q (batch, key-value heads, group, seq, size), k and v (batch, key-value heads, seq, size) -> (batch, seq, query
    heads, size)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernels: AttentionKernels, run: RunFn) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.kernels = kernels
        return run(lambda: kernels.forward(q, k, v))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.kernels.backward(grad.contiguous(), *ctx.saved_tensors), None, None
