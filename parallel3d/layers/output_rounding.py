"""Products of linear layers, rounded to the nearest or stochastically.

An accelerator that rounds every result stochastically (HLAT, section III-D) also rounds these; here this is slow, and
meant for experiments. The product is computed in fp32. Its noise is a function of (seed, iteration, sequence slot,
parameter, first input of the part, index in the sequence), so a row is rounded alike in any micro-batch, on any rank,
and when it is recomputed in the backward pass. The parts that tensor-parallel ranks add up are each rounded before the
sum, with noise of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel3d.layers.micro_batch import MicroBatch
from parallel3d.layers.parameter import ShardedParameter
from parallel3d.parallel.sharding import IndexRun
from parallel3d.parallel.tensor_parallel import TensorParallel
from parallel3d.precision.policy import Policy
from parallel3d.precision.stochastic_rounding import round_by_words
from parallel3d.random_keys import bits, key_of

MatmulFn = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x (tokens, in), weight (out, in), bias (out,) or None -> x W^T + bias (tokens, out)."""


def matmul_for(weight: ShardedParameter, micro_batch: MicroBatch, *, tp: TensorParallel, policy: Policy) -> MatmulFn:
    """Returns the product of all tokens of a micro-batch with `weight`; evaluations round to the nearest."""
    if not (policy.rounds_outputs and micro_batch.training):
        return weight.gemm.forward
    runs = weight.sharding.runs(tp.shard)

    def rounded(x: Tensor, local: Tensor, bias: Tensor | None = None) -> Tensor:
        product = _round(weight.gemm.forward(x.float(), local.float()), weight, runs, micro_batch)
        return product if bias is None else product.add_(bias)

    return rounded


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
        result[token_span.rows] = round_by_words(wide[token_span.rows], words, 0)
    return result
