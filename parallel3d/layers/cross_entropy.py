"""The output projection and the cross-entropy in one step, block by block of tokens, with a sharded vocabulary.

The logits of a token block exist only while their loss and gradients are computed, in the forward pass. The whole
(tokens, vocab) matrix never exists, and the backward pass keeps only d loss / d hidden. The softmax needs two
reductions over the tensor-parallel group for each block (Megatron-LM, section 3): the largest logit, and the sum of
exponentials together with the target's logit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from parallel3d.accelerator import is_accelerator
from parallel3d.layers.embedding import VocabParallel
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.tensor_parallel import TensorParallel

TOKEN_BLOCK_BYTES = 8 << 20  # of logits in the keep_fp32 format: small enough for a CPU's last-level cache
DEVICE_TOKEN_BLOCK_BYTES = 512 << 20  # on a GPU: products large enough to fill it


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
    ) -> Tensor:
        whole, gemm = tp.gather(hidden), weight.gemm
        valid = weight.detach()[:num_valid]
        grad_buffer = weight.sink.buffer[:num_valid] if grad_factor else None
        hidden_grad = torch.empty_like(whole) if grad_factor else None
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        rows = block_rows(num_valid, keep_fp32_dtype, hidden.device)
        for start in range(0, whole.shape[0], rows):
            part = slice(start, start + rows)
            x = whole[part]
            logits = gemm.forward(x, valid).to(keep_fp32_dtype)
            loss += _loss_and_grad(logits, targets[part] - first, tp).sum(dtype=torch.float64)
            if grad_factor and hidden_grad is not None and grad_buffer is not None:
                logits_grad = (logits if grad_factor == 1.0 else logits.mul_(grad_factor)).to(x.dtype)
                hidden_grad[part] = gemm.input_grad(logits_grad, valid)
                gemm.add_weight_grad(grad_buffer, logits_grad, x, wide=weight.sink.accumulate_in_grad_dtype)
        ctx.weight = weight
        if hidden_grad is not None:
            ctx.save_for_backward(tp.sum(hidden_grad))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_grad,) = ctx.saved_tensors
        ctx.weight.sink.on_added()
        return hidden_grad, None, None, None, None, None, None, None


def block_rows(num_valid: int, keep_fp32_dtype: torch.dtype, device: torch.device | str) -> int:
    """Tokens whose logits, for a vocabulary of `num_valid`, exist at the same time."""
    num_bytes = DEVICE_TOKEN_BLOCK_BYTES if is_accelerator(device) else TOKEN_BLOCK_BYTES
    return max(1, num_bytes // (max(1, num_valid) * keep_fp32_dtype.itemsize))


class LinearCrossEntropy(VocabParallel):
    """(tokens_local, hidden), targets (tokens,) -> sum of the token losses, float64 scalar.

    Its gradient is that of the plain sum times `loss_factor`: call backward() on the loss itself, unscaled.
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
    ):
        super().__init__(name, vocab_size, hidden_size, init_std=init_std, context=context, tied=tied)
        self.keep_fp32_dtype = context.policy.keep_fp32_dtype

    def forward(self, hidden: Tensor, targets: Tensor, loss_factor: float = 1.0) -> Tensor:
        return _LinearCrossEntropy.apply(
            hidden,
            self.weight,
            targets,
            self.tp,
            self.first,
            self.num_valid,
            self.keep_fp32_dtype,
            loss_factor if torch.is_grad_enabled() else None,
        )

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """(tokens_local, hidden) -> (tokens, vocab) in the keep_fp32 format, on every rank; no gradients."""
        local = self.weight.gemm.forward(self.tp.gather(hidden), self.weight.detach()).to(self.keep_fp32_dtype)
        parts = local.new_empty((self.tp.group.size, *local.shape))
        self.tp.group.all_gather(parts.flatten(0, 1), local)
        return parts.transpose(0, 1).flatten(1)[:, : self.weight.sharding.shape[0]]


def _loss_and_grad(logits: Tensor, local_targets: Tensor, tp: TensorParallel) -> Tensor:
    """Token losses (rows,); `logits` (rows, vocab_local) becomes softmax - one_hot, the gradient of their sum."""
    num_rows, num_local = logits.shape
    largest = logits.amax(1, keepdim=True) if num_local else logits.new_full((num_rows, 1), float("-inf"))
    tp.group.all_reduce_max(largest)
    logits -= largest
    elsewhere = (local_targets < 0) | (local_targets >= num_local)
    index = local_targets.masked_fill(elsewhere, 0)
    stats = logits.new_zeros((2, num_rows))
    if num_local:
        stats[0] = logits.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill_(elsewhere, 0)
        logits.exp_()
        torch.sum(logits, 1, out=stats[1])
    tp.group.all_reduce(stats)
    target_logit, total = stats[0], stats[1]
    logits /= total.unsqueeze(1)
    if num_local:
        logits[torch.arange(num_rows, device=logits.device), index] -= (~elsewhere).to(logits.dtype)
    return total.log() - target_logit
