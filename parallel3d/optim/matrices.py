"""Assembles whole matrices from the shares of tensor-parallel ranks, for update rules that need them.

States are sharded as under any rule. After the reduction, and before the iteration's entry is agreed, the ranks of a
replica gather the gradients and states of all matrices in the ranges that they hold::

    rank 0   grad, momentum of [ q0 k0 v0 | output, columns 0.. ]      on each rank: whole q, k, v and output, the
    rank 1   grad, momentum of [ q1 k1 v1 | output, columns 4.. ]  ->  direction of the step for each, and of that the
                                                                       rank's own share
So the update itself is local: a survivor applies it without any group. Each rank of a replica computes the directions
of whole matrices, and each backup does so again: the work is repeated, and the bits are the same on every layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel3d.optim.bucket_plan import ParamSlot
from parallel3d.optim.update_rules.update_rule import MatrixRule
from parallel3d.parallel.group import Group
from parallel3d.parallel.sharding import ParamSharding, TpShard


def gather_matrices(grads: Tensor, states: Tensor, tp: Group) -> Tensor:
    """Gathers (tp_size, 1 + num_states, n) from every rank's `grads` (n,) and `states` (num_states, n)."""
    mine = torch.cat([grads.unsqueeze(0), states])
    return tp.all_gather(mine.new_empty(tp.size * mine.numel()), mine.view(-1)).view(tp.size, *mine.shape)


def make_directions(
    rule: MatrixRule,
    gathered: Tensor,
    parameters: Sequence[tuple[ParamSharding, ParamSlot]],
    span: range,
    *,
    grad_scale: float,
    tp_rank: int,
) -> Tensor:
    """Computes the directions of a range's elements on rank `tp_rank`, (n,) in fp32 or wider; 0 between parameters."""
    wide = torch.promote_types(gathered.dtype, torch.float32)
    directions = gathered.new_zeros(len(span), dtype=wide)
    for sharding, slot in parameters:
        first = slot.offset - span.start
        if not 0 <= first < len(span):
            continue
        local = slice(first, first + slot.length)
        whole = _assemble(sharding, gathered[:, :, local].unflatten(-1, slot.shape)).to(wide)
        whole[0] *= grad_scale
        mine = directions[local].view(slot.shape)
        _copy_share(mine, sharding, _directions_of(rule, sharding, whole), TpShard(rank=tp_rank, size=len(gathered)))
    return directions


def _directions_of(rule: MatrixRule, sharding: ParamSharding, whole: Tensor) -> Tensor:
    """Directions of `sharding.shape` from gradient and states (1 + num_states, *shape). Each fused block is one
    matrix."""
    dim = sharding.dim or 0
    sizes = [block.size for block in sharding.fused_blocks] or [sharding.shape[dim]]
    matrices = [matrix.contiguous() for matrix in whole.split(sizes, 1 + dim)]
    return torch.cat([rule.direction(matrix[0], matrix[1:].unbind()) for matrix in matrices], dim)


def _assemble(sharding: ParamSharding, parts: Tensor) -> Tensor:
    """Assembles (rows, *global shape) from (tp_size, rows, *local shape); of copies it takes the first rank's."""
    dim = sharding.dim or 0
    whole = parts.new_empty(parts.shape[1], *sharding.shape)
    for tp_rank, part in enumerate(parts):
        for run in sharding.runs(TpShard(rank=tp_rank, size=len(parts))):
            if tp_rank % run.copies == 0:
                target = whole.narrow(1 + dim, run.global_start, run.length)
                target.copy_(part.narrow(1 + dim, run.local_start, run.length))
    return whole


def _copy_share(local: Tensor, sharding: ParamSharding, whole: Tensor, tp: TpShard) -> None:
    """Writes a rank's share of `whole` (global shape) into `local` (local shape)."""
    dim = sharding.dim or 0
    for run in sharding.runs(tp):
        part = whole.narrow(dim, run.global_start, run.length)
        local.narrow(dim, run.local_start, run.length).copy_(part)
