"""Vocabulary-parallel embedding: each rank holds a part of the rows and looks up the tokens that fall into it.

A vocabulary that does not divide evenly is padded on the last ranks (50257 over 4 ranks: 12565, 12565, 12565, 12562 and
3 rows of padding). No token id points at padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from parallel3d.accelerator import is_accelerator
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.sharding import ParamSharding
from parallel3d.parallel.tensor_parallel import TensorParallel, reduce_from_tp_region


class _LookUp(Function):
    """The rows of this rank's tokens, zeros for those of other ranks; backward adds to the main gradient."""

    @staticmethod
    def forward(ctx: Any, weight: ShardedParameter, tokens: Tensor, first: int, num_valid: int) -> Tensor:
        local = tokens - first
        elsewhere = (local < 0) | (local >= num_valid)
        local = local.masked_fill(elsewhere, 0)
        ctx.weight = weight
        ctx.save_for_backward(local, elsewhere)
        return weight.detach()[local].masked_fill_(elsewhere.unsqueeze(1), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        local, elsewhere = ctx.saved_tensors
        sink = ctx.weight.sink
        buffer = sink.buffer
        if is_accelerator(buffer.device):
            add_rows_on_device(buffer, local, grad.masked_fill(elsewhere.unsqueeze(1), 0))
        else:
            buffer.index_add_(0, local, grad.to(buffer.dtype).masked_fill(elsewhere.unsqueeze(1), 0))
        sink.on_added()
        return None, None, None, None


def add_rows_on_device(buffer: Tensor, index: Tensor, rows: Tensor) -> None:
    """buffer[index[i]] += rows[i]: buffer (vocab, hidden), index (tokens,), rows (tokens, hidden) of any float format.

    The rows of a token are sorted and added up in fp32, and reach the buffer in one addition: the same bits each time,
    where index_add_ adds atomically, and none lost, where index_put_ into bf16 rounds after each row, so that the
    gradient of a frequent token would stop growing after some 256 equal ones.
    """
    wide = torch.promote_types(torch.float32, rows.dtype)
    buffer.add_(torch.ops.aten.embedding_dense_backward(rows.to(wide), index, buffer.shape[0], -1, False))


class VocabParallel(nn.Module):
    """Holds this rank's rows of a (vocab, hidden) weight: token ids `first` to `first + num_valid - 1`.

    `tied`: the weight is embedding and output head at once.
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
        super().__init__()
        self.tp = context.tp
        shape = (vocab_size, hidden_size)
        sharding = ParamSharding(
            name=name, shape=shape, dim=0, padded=True, init_std=init_std, is_token_table=True, tied=tied
        )
        self.weight = context.parameter(sharding)
        self.first, self.num_valid = vocab_range(sharding, context.tp)


class VocabParallelEmbedding(VocabParallel):
    """Token ids (tokens,) int64 -> (tokens_local, hidden)."""

    def forward(self, tokens: Tensor) -> Tensor:
        return reduce_from_tp_region(_LookUp.apply(self.weight, tokens, self.first, self.num_valid), self.tp)


def vocab_range(sharding: ParamSharding, tp: TensorParallel) -> tuple[int, int]:
    """The first token id of this rank and how many it has; (0, 0) for a rank that holds nothing but padding."""
    runs = sharding.runs(tp.shard)
    return (runs[0].global_start, runs[0].length) if runs else (0, 0)
