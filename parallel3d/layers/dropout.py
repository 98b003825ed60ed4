"""Dropout whose mask is a function of (seed, iteration, sequence slot, layer, site, index in the sequence).

It does not depend on the rank or the micro-batch that an element is in: a step that is repeated after a failure, or run
on another layout, drops the same elements.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from parallel3d.kernels.layer_kernels import DropoutKernels
from parallel3d.kernels.torch_dropout import DropoutMask
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.random_keys import key_of


class _Masked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: DropoutMask, kernels: DropoutKernels) -> Tensor:
        y, kept = kernels.forward(x, mask)
        ctx.save_for_backward(kept)
        ctx.mask, ctx.kernels = mask, kernels
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return ctx.kernels.backward(grad, ctx.mask, kept), None, None


def dropout(
    x: Tensor,
    probability: float,
    *,
    micro_batch: MicroBatch,
    layer: int,
    site: str,
    tp: TensorParallel,
    kernels: DropoutKernels,
) -> Tensor:
    """(tokens_local, hidden) -> the same, kept elements scaled by 1 / (1 - probability)."""
    if probability == 0.0 or not micro_batch.training:
        return x
    when = (micro_batch.seed, micro_batch.iteration)
    mask = DropoutMask(
        keys=tuple(key_of("dropout", *when, slot, layer, site) for slot in micro_batch.slots),
        sequence_length=micro_batch.sequence_length,
        first_token=tp.first_local_token(x.shape[0]),
        probability=probability,
    )
    return _Masked.apply(x, mask, kernels)
