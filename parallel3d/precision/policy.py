"""Which number format is used where, and how it is rounded: one row for each `precision.policy`.

Gradients are added up, reduced and normed in `grad`; norms, softmax, loss and rotary tables are computed in
`sensitive`; with `has_master` the optimizer keeps its own copy of the weights, in the format of its moments.

    policy      weights, activations    main gradients    moments    master weights    the update is stored
    fp32        fp32                    fp32              fp32       -                 -
    fp64        fp64                    fp64              fp64       -                 -
    fp16        fp16                    fp32              fp32       fp32              to the nearest
    bf16        bf16                    fp32              fp32       fp32              to the nearest
    bf16_sr     bf16                    bf16              bf16       -                 stochastically
    bf16_pure   bf16                    bf16              bf16       -                 to the nearest

fp16 scales its gradients until they are in the main gradients (`loss_scale.py`).
HLAT (Fan et al. 2024, section III-D) calls the bf16 row "mixed precision", and trained its 7B model with bf16_sr.
bf16_pure differs from that in the rounding alone: it is there to be compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from parallel3d.config.schema import PrecisionConfig


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Formats of one precision policy."""

    name: str
    compute: torch.dtype  # weights as the layers see them, activations, messages between stages
    grad: torch.dtype  # main gradients: accumulation over micro-batches and reduction over replicas
    state: torch.dtype  # optimizer moments, and the master weights where there are any
    keep_fp32_dtype: torch.dtype  # norms, softmax, loss, rotary tables
    has_master: bool = False
    """Whether the optimizer updates a copy of the weights; without one `state` is `compute`."""
    update_rounding: Literal["none", "nearest", "stochastic"] = "none"
    """How weights and moments are stored that are narrower than the update is computed; none: they are not."""
    rounds_accumulation: bool = False
    """Whether each micro-batch's gradients are rounded stochastically as they are added."""
    rounds_outputs: bool = False
    """Whether the results of linear layers are rounded stochastically, from an fp32 product."""
    scales_loss: bool = False
    """Whether gradients are multiplied by `precision.loss_scale` until they are in the main gradients."""


def _uniform(name: str, dtype: torch.dtype) -> Policy:
    return Policy(name=name, compute=dtype, grad=dtype, state=dtype, keep_fp32_dtype=dtype)


def _mixed(name: str, dtype: torch.dtype, *, scales_loss: bool = False) -> Policy:
    wide = torch.float32
    return Policy(
        name=name, compute=dtype, grad=wide, state=wide, keep_fp32_dtype=wide, has_master=True, scales_loss=scales_loss
    )


def _narrow(name: str, update_rounding: Literal["nearest", "stochastic"]) -> Policy:
    return Policy(
        name=name,
        compute=torch.bfloat16,
        grad=torch.bfloat16,
        state=torch.bfloat16,
        keep_fp32_dtype=torch.float32,
        update_rounding=update_rounding,
    )


POLICIES = {
    policy.name: policy
    for policy in (
        _uniform("fp32", torch.float32),
        _uniform("fp64", torch.float64),
        _mixed("fp16", torch.float16, scales_loss=True),
        _mixed("bf16", torch.bfloat16),
        _narrow("bf16_sr", "stochastic"),
        _narrow("bf16_pure", "nearest"),
    )
}


def policy_of(precision: PrecisionConfig) -> Policy:
    """The row that the configuration names, with what it rounds stochastically on request."""
    targets = precision.stochastic_rounding
    return replace(
        POLICIES[precision.policy],
        rounds_accumulation="accumulation" in targets,
        rounds_outputs="outputs" in targets,
    )
