"""Products of linear layers, rounded to the nearest or stochastically.

Stochastic rounding of outputs is what an accelerator does that rounds every result so (HLAT, section III-D); here it is
slow, and there to be tried. The product is made in fp32. Its noise is a function of (seed, iteration, sequence slot,
parameter, first input of the part, index in the sequence): whoever computes a row of it, in which micro-batch, or once
more in the backward pass, rounds it alike. The parts that tensor-parallel ranks add up are rounded each by noise of
their own, before they are added.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel3d.layers.gemm import matmul
from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.parallel.sharding import IndexRun
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.precision.policy import Policy
from parallel3d.precision.stochastic_rounding import noise_of, round_to_bf16
from parallel3d.random_keys import bits, key_of

MatmulFn = Callable[[Tensor, Tensor], Tensor]
"""x (tokens, in), weight (out, in) -> x W^T (tokens, out)."""


def matmul_for(weight: ShardedParameter, micro_batch: MicroBatch, *, tp: TensorParallel, policy: Policy) -> MatmulFn:
    """How `weight` is multiplied with all tokens of a micro-batch; evaluations round to the nearest."""
    if not (policy.rounds_outputs and micro_batch.training):
        return _nearest
    runs = weight.sharding.runs(tp.shard)
    return lambda x, local: _round(matmul(x.float(), local.float().t()), weight, runs, micro_batch)


def _nearest(x: Tensor, weight: Tensor) -> Tensor:
    return matmul(x, weight.t())


def _round(wide: Tensor, weight: ShardedParameter, runs: tuple[IndexRun, ...], micro_batch: MicroBatch) -> Tensor:
    """(tokens, out_local) fp32 -> bf16."""
    num_outputs, is_output_sharded = weight.sharding.shape[0], weight.sharding.dim == 0
    first_input = 0 if is_output_sharded else runs[0].global_start
    spans = [(run.global_start, run.length) for run in runs] if is_output_sharded else [(0, num_outputs)]
    columns = torch.cat([torch.arange(start, start + length, device=wide.device) for start, length in spans])
    result = torch.empty(wide.shape, dtype=torch.bfloat16, device=wide.device)
    for token_span in micro_batch.token_spans(0, len(wide)):
        when = (micro_batch.seed, micro_batch.iteration, token_span.slot)
        key = key_of("output", *when, weight.sharding.name, first_input)
        rows = torch.arange(token_span.positions.start, token_span.positions.stop, device=wide.device)
        words = bits(key, rows.unsqueeze(1) * num_outputs + columns)
        result[token_span.rows] = round_to_bf16(wide[token_span.rows], noise_of(words, 0))
    return result
