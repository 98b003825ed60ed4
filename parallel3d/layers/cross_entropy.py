"""The output projection and the cross-entropy in one step, block by block of tokens, with a sharded vocabulary.

The logits of a token block exist only while their loss and gradients are computed, in the forward pass. The whole
(tokens, vocab) matrix never exists, and the backward pass keeps only d loss / d hidden. Each block
needs two reductions over the tensor-parallel group (`kernels/torch_cross_entropy.py`).

Every product for the weight reads and writes its whole gradient. On a CPU one product therefore takes the gradients of
several blocks of logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from parallel3d.accelerator import is_accelerator
from parallel3d.kernels.layer_kernels import CrossEntropyFn
from parallel3d.kernels.torch_cross_entropy import LOGITS_ALIGNMENT
from parallel3d.layers.embedding import VocabParallel
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.tensor_parallel import TensorParallel

TOKEN_BLOCK_BYTES = 8 << 20  # of logits, small enough for a CPU's last-level cache
LEAST_BLOCK_TOKENS = 256  # if their gradients fit: each product of a block brings the whole weight into its own order
DEVICE_TOKEN_BLOCK_BYTES = 512 << 20  # on a GPU, products large enough to fill it
GRADIENT_BLOCK_BYTES = 64 << 20  # of logits' gradients on a CPU, for one product for the weight


class _LinearCrossEntropy(Function):
    """The sum over tokens of the loss; its backward returns the gradient that the forward pass computed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: ShardedParameter,
        targets: Tensor,
        tp: TensorParallel,
        first: int,
        num_valid: int,
        keep_fp32_dtype: torch.dtype,
        grad_factor: float | None,
        masks_targets: bool,
        cross_entropy: CrossEntropyFn,
        cap: float | None,
    ) -> Tensor:
        whole, gemm = tp.gather(hidden), weight.gemm
        valid = weight.detach()[:num_valid]
        grad_buffer = weight.sink.buffer[:num_valid] if grad_factor else None
        hidden_grad = torch.empty_like(whole) if grad_factor else None
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        rows, local_targets = block_rows(num_valid, whole.dtype, whole.device), targets - first
        grad_rows = gradient_rows(rows, num_valid, whole.dtype, whole.device) if grad_factor else rows
        buffer = _logits_buffer(min(grad_rows, whole.shape[0]), num_valid, whole)
        for grad_start in range(0, whole.shape[0], grad_rows):
            x = whole[grad_start : grad_start + grad_rows]
            for start in range(0, x.shape[0], rows):
                x_part = x[start : start + rows]
                part = slice(grad_start + start, grad_start + start + x_part.shape[0])
                logits = gemm.forward(x_part, valid, out=buffer[start : start + x_part.shape[0]])
                slope = None if cap is None else cap_logits(logits, cap)
                losses = cross_entropy(logits, local_targets[part], tp.group, grad_factor, keep_fp32_dtype)
                if masks_targets:  # a negative target is of no rank: its loss and gradient are those of a whole softmax
                    ignored = targets[part] < 0
                    losses = losses.masked_fill(ignored, 0.0)
                    if grad_factor:
                        logits.masked_fill_(ignored[:, None], 0.0)
                loss += losses.sum(dtype=torch.float64)
                if hidden_grad is not None and slope is not None:
                    logits.mul_(slope)
                if hidden_grad is not None:
                    gemm.input_grad(logits, valid, out=hidden_grad[part])
            if grad_buffer is not None:
                wide = weight.sink.accumulate_in_grad_dtype
                gemm.add_weight_grad(grad_buffer, buffer[: x.shape[0]], x, wide=wide)
        ctx.weight = weight
        if hidden_grad is not None:
            ctx.save_for_backward(tp.sum(hidden_grad))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_grad,) = ctx.saved_tensors
        ctx.weight.sink.on_added()
        return hidden_grad, *(None,) * 10


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """Makes c tanh(x / c) of logits x where they lie, c being the cap; returns the slope of that."""
    tanh = logits.div_(cap).tanh_()
    slope = tanh.square().neg_().add_(1)
    tanh.mul_(cap)
    return slope


def _logits_buffer(num_rows: int, num_valid: int, like: Tensor) -> Tensor:
    """Memory for (num_rows, num_valid) logits. An accelerator's products are slow with rows that don't begin at
    multiples of 16 bytes, as those of 50257 tokens would."""
    alignment = LOGITS_ALIGNMENT if is_accelerator(like.device) else 1
    return like.new_empty((num_rows, -(-num_valid // alignment) * alignment))[:, :num_valid]


def block_rows(num_valid: int, dtype: torch.dtype, device: torch.device | str) -> int:
    """Tokens whose logits, for a vocabulary of `num_valid`, exist at the same time in `dtype`."""
    row_bytes = max(1, num_valid) * dtype.itemsize
    if is_accelerator(device):
        return max(1, DEVICE_TOKEN_BLOCK_BYTES // row_bytes)
    least = min(LEAST_BLOCK_TOKENS, GRADIENT_BLOCK_BYTES // row_bytes)
    return max(1, least, TOKEN_BLOCK_BYTES // row_bytes)


def gradient_rows(rows: int, num_valid: int, dtype: torch.dtype, device: torch.device | str) -> int:
    """Tokens of one product for the weight: a whole number of token blocks of `rows`."""
    num_bytes = 0 if is_accelerator(device) else GRADIENT_BLOCK_BYTES
    return max(1, num_bytes // (max(1, num_valid) * dtype.itemsize * rows)) * rows


class LinearCrossEntropy(VocabParallel):
    """(tokens_local, hidden), targets (tokens,) -> sum of the token losses, float64 scalar; negative targets have none
    (`masks_targets`).

    Its gradient is that of the plain sum times `loss_factor`: call backward() on the loss itself, unscaled. With a
    cap c logits x become c tanh(x / c).
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        init_std: float,
        context: LayerContext,
        tied: bool = False,
        cap: float | None = None,
    ):
        super().__init__(name, vocab_size, hidden_size, init_std=init_std, context=context, tied=tied)
        self.keep_fp32_dtype = context.policy.keep_fp32_dtype
        self.cross_entropy, self.cap = context.kernels.cross_entropy, cap

    def forward(
        self, hidden: Tensor, targets: Tensor, loss_factor: float = 1.0, *, masks_targets: bool = False
    ) -> Tensor:
        return _LinearCrossEntropy.apply(
            hidden,
            self.weight,
            targets,
            self.tp,
            self.first,
            self.num_valid,
            self.keep_fp32_dtype,
            loss_factor if torch.is_grad_enabled() else None,
            masks_targets,
            self.cross_entropy,
            self.cap,
        )

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """(tokens_local, hidden) -> (tokens, vocab) in the keep_fp32 format, on every rank; no gradients."""
        local = self.weight.gemm.forward(self.tp.gather(hidden), self.weight.detach())
        if self.cap is not None:
            cap_logits(local, self.cap)
        local = local.to(self.keep_fp32_dtype)
        parts = local.new_empty((self.tp.group.size, *local.shape))
        self.tp.group.all_gather(parts.flatten(0, 1), local)
        return parts.transpose(0, 1).flatten(1)[:, : self.weight.sharding.shape[0]]
