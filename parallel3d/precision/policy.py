"""Precision policies with torch's dtypes; their rows are in parallel3d/config/specs/policies.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from parallel3d.config.schema import PrecisionConfig
from parallel3d.config.specs.policies import POLICY_SPECS, PolicySpec, Rounding
from parallel3d.precision.dtypes import dtype_of


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The formats of one precision policy; see PolicySpec."""

    name: str
    compute: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    keep_fp32_dtype: torch.dtype
    has_master: bool = False
    update_rounding: Rounding = "none"
    scales_loss: bool = False
    rounds_accumulation: bool = False
    """Whether each micro-batch's gradients are rounded stochastically as they are added."""
    rounds_outputs: bool = False
    """Whether the results of linear layers are rounded stochastically, from an fp32 product."""


def _policy(spec: PolicySpec) -> Policy:
    return Policy(
        name=spec.name,
        compute=dtype_of(spec.compute),
        grad=dtype_of(spec.grad),
        state=dtype_of(spec.state),
        keep_fp32_dtype=dtype_of(spec.keep_fp32),
        has_master=spec.has_master,
        update_rounding=spec.update_rounding,
        scales_loss=spec.scales_loss,
    )


POLICIES = {name: _policy(spec) for name, spec in POLICY_SPECS.items()}


def policy_of(precision: PrecisionConfig) -> Policy:
    """The configuration's policy, with `precision.stochastic_rounding` applied."""
    targets = precision.stochastic_rounding
    return replace(
        POLICIES[precision.policy],
        rounds_accumulation="accumulation" in targets,
        rounds_outputs="outputs" in targets,
    )
