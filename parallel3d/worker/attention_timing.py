"""Chooses the form of attention of a run on CPUs, by timing both at the run's shape.

torch's SDPA reaches a tenth of what the machine's products do; products over blocks of queries are up to twice as fast
in bf16 and slower for short sequences in fp32 (docs/experiments.md). The choice travels with those of the libraries
(`worker/gemm_timing.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
TIMED_SCORES = 1 << 20
"""Of one run, at most, unless a head for each thread has more; 10 to 50 ms."""
TIMED_LENGTH = 1536
"""Tokens of a sequence, at most."""
PREPARED_LENGTH = 16
"""Tokens of an untimed pass in each form, in which libraries prepare themselves."""
MAX_ROUNDS = 4
"""Of each form."""
BUDGET_S = 0.06
"""After that no round begins if those before have decided."""
CLEAR_GAIN = 3.0
"""A form that is this many times as fast in the first round needs no other: SDPA in bf16 on a CPU without instructions
for it takes as long as all else at the start together."""

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


def timed_part(shape: AttentionShape, num_threads: int) -> AttentionShape:
    """The part of attention that is timed in its place: fewer sequences and heads, and of long sequences the beginning.

    It has a head of a sequence for each thread, as far as there are any, and whole groups of query heads that share a
    key-value head or a part of one group.
    """
    length, group = min(shape.length, TIMED_LENGTH), shape.num_query_heads // shape.num_kv_heads
    num_pairs = max(num_threads, TIMED_SCORES // length**2)
    num_kv_heads = min(shape.num_kv_heads, max(1, num_pairs // group))
    num_query_heads = num_kv_heads * min(group, num_pairs)
    num_sequences = min(shape.num_sequences, max(1, num_pairs // num_query_heads))
    return replace(
        shape,
        num_sequences=num_sequences,
        length=length,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
    )


def time_attention(shape: AttentionShape, clock: Callable[[], float] = time.perf_counter) -> AttentionTimings:
    """Times a forward and a backward pass in both forms, in turn; the shortest of some runs counts."""
    part = timed_part(shape, torch.get_num_threads())
    prepare = _passes(replace(part, num_sequences=1, length=min(part.length, PREPARED_LENGTH)))
    for form in get_args(AttentionForm):
        prepare(form)
    run, begun = _passes(part), clock()
    rounds: list[AttentionTimings] = []

    def time_once(form: AttentionForm) -> float:
        started = clock()
        run(form)
        return clock() - started

    while len(rounds) < MAX_ROUNDS and (not _is_decided(rounds) or clock() - begun <= BUDGET_S):
        rounds.append({form: time_once(form) for form in get_args(AttentionForm)})
    return {form: min(each[form] for each in rounds) for form in get_args(AttentionForm)}


def _passes(shape: AttentionShape) -> Callable[[AttentionForm], object]:
    """What computes a forward and a backward pass in a form."""
    all_heads = (shape.num_query_heads, shape.num_kv_heads, shape.num_kv_heads)
    sizes = [(shape.num_sequences, shape.length, num_heads, shape.head_size) for num_heads in all_heads]
    q, k, v = (torch.ones(size, dtype=shape.dtype, requires_grad=True) for size in sizes)
    grad, kernels = torch.ones_like(q), layer_kernels(shape.kernels).attention
    return lambda form: torch.autograd.grad(attend(q, k, v, form=form, kernels=kernels), (q, k, v), grad)


def _is_decided(rounds: Sequence[AttentionTimings]) -> bool:
    """After two rounds, or after the first one if the forms are far apart."""
    return len(rounds) > 1 or any(max(each.values()) > CLEAR_GAIN * min(each.values()) for each in rounds)


def choose_form(timings: AttentionTimings) -> AttentionForm:
    """Blocks if they gain enough, else SDPA."""
    return "blocks" if timings["blocks"] * MIN_GAIN <= timings["sdpa"] else "sdpa"


def describe_form(timings: AttentionTimings) -> str:
    """One line for the log."""
    gain = timings["sdpa"] / timings["blocks"]
    return f"attention: {choose_form(timings)}; products over blocks of queries are {gain:.1f} times as fast as SDPA"
