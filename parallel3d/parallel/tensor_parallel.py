"""The borders of the tensor-parallel region: conjugate pairs of autograd functions.

Activations are (tokens, hidden), tokens = micro-batch x sequence flattened. Outside of the region they are either the
same on every rank, or, under sequence parallelism, sharded along the tokens (Korthikanti et al., "Reducing activation
recomputation in large transformer models", section 4.2.2)::

                     enter: forward / backward          leave: forward / backward
    plain            nothing / all-reduce               all-reduce / nothing
    sequence par.    all-gather / reduce-scatter        reduce-scatter / all-gather
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd import Function

from parallel3d.parallel.group import DoneWork, Group, SoloGroup, Work
from parallel3d.parallel.recompute_context import RecomputeContext
from parallel3d.parallel.sharding import TpShard


@dataclass(kw_only=True, eq=False)
class TensorParallel:
    """The group of one replica's layers, and whether tokens are sharded over it between the layers.

    Layers keep this object for their life; each membership generation replaces its group.
    """

    group: Group
    sequence_parallel: bool = False
    recompute_context: RecomputeContext = field(default_factory=RecomputeContext)
    """Runs the matrix products of the layers in the region."""

    @property
    def shard(self) -> TpShard:
        """This rank's share of the parameters in the region."""
        return TpShard(rank=self.group.rank, size=self.group.size)

    @property
    def is_token_sharded(self) -> bool:
        return self.sequence_parallel and self.group.size > 1

    def num_local_tokens(self, num_tokens: int) -> int:
        """Returns the rows of this rank's activations outside of the region."""
        return num_tokens // self.group.size if self.is_token_sharded else num_tokens

    def first_local_token(self, num_local: int) -> int:
        """Returns the index of the first of this rank's `num_local` rows among the micro-batch's tokens."""
        return num_local * self.group.rank if self.is_token_sharded else 0

    def gather_async(self, x: Tensor) -> tuple[Tensor, Work]:
        """Gathers (tokens_local, n) -> (tokens, n) if tokens are sharded, else returns x itself."""
        if not self.is_token_sharded:
            return x, DoneWork()
        x = x.contiguous()
        whole = x.new_empty((x.shape[0] * self.group.size, *x.shape[1:]))
        return whole, self.group.all_gather_async(whole, x)

    def sum_async(self, partial: Tensor) -> tuple[Tensor, Work]:
        """Sums (tokens, n) over the group; each rank gets all of it, or its tokens if they are sharded.

        `partial` may be overwritten, so the caller must own it.
        """
        if not self.is_token_sharded:
            return partial, self.group.all_reduce_async(partial)
        part = partial.new_empty((partial.shape[0] // self.group.size, *partial.shape[1:]))
        return part, self.group.reduce_scatter_async(part, partial)

    def gather(self, x: Tensor) -> Tensor:
        whole, work = self.gather_async(x)
        work.wait()
        return whole

    def sum(self, partial: Tensor) -> Tensor:
        total, work = self.sum_async(partial.contiguous())
        work.wait()
        return total


class _ReduceFromRegion(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        if tp.group.size == 1:
            return partial.view_as(partial)
        return tp.sum(partial.clone() if not tp.is_token_sharded else partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.gather(grad), None


def reduce_from_tp_region(partial: Tensor, tp: TensorParallel) -> Tensor:
    """Sums the ranks' partial (tokens, n) forward; gathers the gradient backward, so that each rank has all of it."""
    return _ReduceFromRegion.apply(partial, tp)


def solo_region() -> TensorParallel:
    """Returns the region of one rank, for the reference model."""
    return TensorParallel(group=SoloGroup())
