"""The least that each part of a step has to do, beside which counts are shown. Pure.

With u the bytes of (tokens, hidden) and v those of (tokens, intermediate), in 16-bit formats: every chain between two
products is one kernel that reads its inputs and writes its results once. Products and attention count as kernels; their
bytes do not count. Collectives are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from parallel3d.config.derived import family_of
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.families.block_kinds import RMS_NORM

HEAD_BLOCK_BYTES = 512 << 20
"""Of fp32 logits at a time."""
UPDATE_BYTES = 14
"""An element's weight and two moments in bf16, read and written, and its bf16 gradient."""
NORM_BYTES = 2
CROSS_ENTROPY_BYTES = 6
"""A logit is read for its statistics, then read and overwritten by its gradient."""


@dataclass(frozen=True, kw_only=True)
class IdealWork:
    """Kernels, and the bytes of those that are neither products nor attention."""

    num_kernels: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class _LayerIdeal:
    """Kernels of a layer, forward and backward, and its bytes in multiples of u and of v."""

    forward_kernels: int
    forward_bytes: tuple[int, int]
    backward_kernels: int
    backward_bytes: tuple[int, int]


_PRE_NORM_SWIGLU = _LayerIdeal(forward_kernels=12, forward_bytes=(12, 3), backward_kernels=22, backward_bytes=(14, 6))
"""Forward: two norms with the sum before them (4 u each), the rotation of q, k in place (4 u), silu * up (3 v)."""
_PRE_NORM_GELU = _LayerIdeal(forward_kernels=10, forward_bytes=(12, 2), backward_kernels=22, backward_bytes=(19, 5))
"""Forward: two norms with the sum before them (4 u each), two biases after a sum over ranks (2 u each), GELU (2 v).
Backward: the norms (8 u), dq, dk, dv into one (6 u), the sums of four biases (5 u + v), GELU (4 v)."""


def ideal_layer(model: ModelConfig, num_tokens: int, tp_size: int, num_local: int) -> tuple[IdealWork, IdealWork]:
    """A layer's forward and backward pass; `num_local` tokens are this rank's outside of the products."""
    ideal = _PRE_NORM_SWIGLU if family_of(model).norm is RMS_NORM else _PRE_NORM_GELU
    u = 2 * num_local * model.hidden_size
    v = 2 * num_tokens * model.intermediate_size // tp_size
    passes = (ideal.forward_kernels, ideal.forward_bytes), (ideal.backward_kernels, ideal.backward_bytes)
    forward, backward = (
        IdealWork(num_kernels=kernels, num_bytes=of_u * u + of_v * v) for kernels, (of_u, of_v) in passes
    )
    return forward, backward


def ideal_phases(config: Config, *, num_elements: int, num_buckets: int) -> Mapping[str, IdealWork]:
    """The parts of a step of a model on one stage, with `num_elements` of parameters on each rank."""
    model, batch, tp = config.model, config.batch, config.parallel.tp_size
    count, size = batch.num_micro_batches, batch.micro_batch_size
    assert count is not None and size is not None, "needs a resolved configuration"
    num_tokens = size * batch.sequence_length
    num_local = num_tokens // tp if config.parallel.sequence_parallel else num_tokens
    forward, backward = ideal_layer(model, num_tokens, tp, num_local)
    layers, u = model.num_hidden_layers, 2 * num_local * model.hidden_size
    vocab = ceil(model.vocab_size / tp)
    blocks = ceil(4 * num_tokens * vocab / HEAD_BLOCK_BYTES)
    micro_batch = {
        "embedding": IdealWork(num_kernels=1, num_bytes=2 * u),
        "layers": IdealWork(num_kernels=layers * forward.num_kernels, num_bytes=layers * forward.num_bytes),
        "final_norm": IdealWork(num_kernels=1, num_bytes=4 * u),
        "head": IdealWork(num_kernels=4 * blocks, num_bytes=CROSS_ENTROPY_BYTES * num_tokens * vocab),
        "backward": IdealWork(
            num_kernels=layers * backward.num_kernels + 4, num_bytes=layers * backward.num_bytes + 6 * u
        ),
    }
    each = {
        name: IdealWork(num_kernels=work.num_kernels * count, num_bytes=work.num_bytes * count)
        for name, work in micro_batch.items()
    }
    return each | {
        "norms": IdealWork(num_kernels=num_buckets, num_bytes=NORM_BYTES * num_elements),
        "update": IdealWork(num_kernels=num_buckets, num_bytes=UPDATE_BYTES * num_elements),
    }
