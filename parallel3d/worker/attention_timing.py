"""Chooses the form of attention of a run on CPUs, by timing both at the run's shape.

torch's SDPA reaches a tenth of what the machine's products do; products over blocks of queries are up to twice as fast
in bf16 and slower for short sequences in fp32 (docs/experiments.md). The choice travels with those of the libraries
(`worker/gemm_timing.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import nn

from parallel3d.config.schema import Config
from parallel3d.kernels.choice import KernelForm
from parallel3d.kernels.layer_kernels import layer_kernels
from parallel3d.layers.attention import CausalSelfAttention, attend
from parallel3d.layers.gemm import AttentionForm
from parallel3d.precision.policy import policy_of

MIN_GAIN = 1.05
"""SDPA stays unless the other form is this many times as fast: timings scatter."""
TIMED_SCORES = 1 << 21
"""Of one run, at most, unless a single sequence has more; about 20 ms."""
ROUNDS = 4
"""Of each form; the first one, in which kernels are prepared, does not count."""
BUDGET_S = 0.06
"""After that no round begins."""

AttentionTimings = Mapping[AttentionForm, float]
"""Seconds of a forward and a backward pass in each form."""


@dataclass(frozen=True)
class AttentionShape:
    """A rank's heads of one micro-batch."""

    num_sequences: int
    length: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kernels: KernelForm = "torch"


def is_attention_measured(config: Config, device: torch.device) -> bool:
    """Whether a measurement decides: on CPUs, unless bits must not depend on it or SDPA is the only choice."""
    if device.type != "cpu" or config.run.cpu_attention != "auto" or config.precision.sums == "exact":
        return False
    return not config.data.document_mask and policy_of(config.precision).compute != torch.float64


def attention_shape(config: Config, stage: nn.Module, kernels: KernelForm = "torch") -> AttentionShape | None:
    """The shape of attention without window or cap in `stage` (it may be on the meta device); None if there is none."""
    assert config.batch.micro_batch_size is not None, "needs a resolved configuration"
    length = config.batch.sequence_length
    for module in stage.modules():
        if not isinstance(module, CausalSelfAttention) or module.score_cap is not None:
            continue
        if module.window is None or module.window >= length:
            heads, dtype = module.heads, policy_of(config.precision).compute
            return AttentionShape(
                num_sequences=config.batch.micro_batch_size,
                length=length,
                num_query_heads=heads.num_query_heads,
                num_kv_heads=heads.num_kv_heads,
                head_size=heads.head_size,
                dtype=torch.float32 if dtype is torch.float16 else dtype,
                kernels=kernels,
            )
    return None


def time_attention(shape: AttentionShape, clock: Callable[[], float] = time.perf_counter) -> AttentionTimings:
    """Times a forward and a backward pass in both forms, in turn; the shortest of some runs counts."""
    num_sequences = max(1, TIMED_SCORES // (shape.num_query_heads * shape.length**2))
    rows = (min(num_sequences, shape.num_sequences), shape.length)
    sizes = [
        (*rows, heads, shape.head_size) for heads in (shape.num_query_heads, shape.num_kv_heads, shape.num_kv_heads)
    ]
    q, k, v = (torch.ones(size, dtype=shape.dtype, requires_grad=True) for size in sizes)
    grad, kernels = torch.ones_like(q), layer_kernels(shape.kernels).attention
    shortest: dict[AttentionForm, float] = {form: float("inf") for form in get_args(AttentionForm)}
    begun = clock()
    for number in range(ROUNDS):
        if number > 1 and clock() - begun > BUDGET_S:
            break
        for form in shortest:
            started = clock()
            torch.autograd.grad(attend(q, k, v, form=form, kernels=kernels), (q, k, v), grad)
            if number:
                shortest[form] = min(shortest[form], clock() - started)
    return shortest


def choose_form(timings: AttentionTimings) -> AttentionForm:
    """Blocks if they gain enough, else SDPA."""
    return "blocks" if timings["blocks"] * MIN_GAIN <= timings["sdpa"] else "sdpa"


def describe_form(timings: AttentionTimings) -> str:
    """One line for the log."""
    gain = timings["sdpa"] / timings["blocks"]
    return f"attention: {choose_form(timings)}; products over blocks of queries are {gain:.1f} times as fast as SDPA"
