"""Vocabulary-parallel embedding: each rank holds a part of the rows and looks up the tokens that fall into it.

A vocabulary that does not divide evenly is padded on the last ranks (50257 over 4 ranks: 12565, 12565, 12565, 12562 and
3 rows of padding). No token id points at padding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from parallel3d.kernels.layer_kernels import AddRowsFn
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.layers.placement import LayerContext
from parallel3d.parallel.sharding import ParamSharding
from parallel3d.parallel.tensor_parallel import TensorParallel, reduce_from_tp_region


class _LookUp(Function):
    """The rows of this rank's tokens, zeros for those of other ranks; backward adds to the main gradient."""

    @staticmethod
    def forward(
        ctx: Any, weight: ShardedParameter, tokens: Tensor, first: int, num_valid: int, add_rows: AddRowsFn
    ) -> Tensor:
        local = tokens - first
        ctx.weight, ctx.num_valid, ctx.add_rows = weight, num_valid, add_rows
        ctx.save_for_backward(local)
        elsewhere = (local < 0) | (local >= num_valid)
        return weight.detach()[local.masked_fill(elsewhere, 0)].masked_fill_(elsewhere.unsqueeze(1), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        (local,) = ctx.saved_tensors
        sink = ctx.weight.sink
        ctx.add_rows(sink.buffer[: ctx.num_valid], local, grad)
        sink.on_added()
        return None, None, None, None, None


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
        self.add_rows = context.kernels.add_rows


class VocabParallelEmbedding(VocabParallel):
    """Token ids (tokens,) int64 -> (tokens_local, hidden)."""

    def forward(self, tokens: Tensor) -> Tensor:
        found = _LookUp.apply(self.weight, tokens, self.first, self.num_valid, self.add_rows)
        return reduce_from_tp_region(found, self.tp)


def vocab_range(sharding: ParamSharding, tp: TensorParallel) -> tuple[int, int]:
    """The first token id of this rank and how many it has; (0, 0) for a rank that holds nothing but padding."""
    runs = sharding.runs(tp.shard)
    return (runs[0].global_start, runs[0].length) if runs else (0, 0)
